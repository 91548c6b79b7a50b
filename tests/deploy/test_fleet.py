"""`deploy/kubernetes/fleet` and the router's image: what must agree with each other, with the engine, and with smg."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from typing import Any, Final

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from engine.tokenizer_manager.http.guards.auth import OPEN_PATHS

from .places import DEPLOY, container, documents, instructions

FOLDER: Final = "kubernetes/fleet"
ROUTER_DOCKERFILE: Final = "docker/router.Dockerfile"
ROOT: Final = DEPLOY.parent
SMG: Final = ROOT / "build" / "routers" / "smg" / "bin" / "smg"
VALIDATE: Final = ROOT / "build" / "kubernetes-validate" / "bin" / "kubernetes-validate"
ENDING_S: Final = 10


def smg_version() -> str:
    """The version that the slow tests start, from the Makefile."""
    found = re.search(r"smg==([\d.]+)", (ROOT / "Makefile").read_text())
    assert found
    return found[1]


VERSION: Final = smg_version()


def objects() -> dict[tuple[str, str], Any]:
    """Kind and name -> object."""
    names = sorted(path.name for path in (DEPLOY / FOLDER).glob("*.yaml"))
    found = [each for name in names if name != "kustomization.yaml" for each in documents(f"{FOLDER}/{name}")]
    keys = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(keys)) == len(keys)
    return dict(zip(keys, found, strict=True))


def pod(name: str) -> Any:
    return objects()["Deployment", name]["spec"]["template"]["spec"]


def only_container(name: str) -> Any:
    [found] = pod(name)["containers"]
    return found


def options(arguments: list[str]) -> dict[str, str]:
    """`--name=value` -> value; "" for a switch."""
    return {text.partition("=")[0]: text.partition("=")[2] for text in arguments if text.startswith("--")}


def test_every_file_is_listed():
    [kustomization] = documents(f"{FOLDER}/kustomization.yaml")
    present = {path.name for path in (DEPLOY / FOLDER).glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == present
    used = {only_container(name)["image"] for name in ("engine-fleet", "engine-router")}
    assert {each["name"] for each in kustomization["images"]} == used


def test_a_server_is_the_one_of_the_single_server_s_manifest():
    """So that what is tested of that container holds for this one: options, probes, times, keys, mounts."""
    assert only_container("engine-fleet") == container()
    [stateful] = documents("kubernetes/statefulset.yaml")
    own, single = pod("engine-fleet"), stateful["spec"]["template"]["spec"]
    for name in ("terminationGracePeriodSeconds", "securityContext", "automountServiceAccountToken"):
        assert own[name] == single[name]
    volumes = {each["name"] for each in own["volumes"]}
    assert volumes == {each["name"] for each in only_container("engine-fleet")["volumeMounts"]}


def selectors() -> Iterator[tuple[str, dict[str, str], str]]:
    """Place, selector, and the Deployment whose pods it means."""
    for (kind, name), found in objects().items():
        spec = found.get("spec", {})
        if kind == "Service":
            yield f"{kind} {name}", spec["selector"], name
        elif kind in ("Deployment", "PodDisruptionBudget"):
            yield f"{kind} {name}", spec["selector"]["matchLabels"], name
    for constraint in pod("engine-fleet")["topologySpreadConstraints"]:
        yield "spread", constraint["labelSelector"]["matchLabels"], "engine-fleet"
    selector = options(only_container("engine-router")["args"])["--selector"]
    key, _, value = selector.partition("=")
    yield "router", {key: value}, "engine-fleet"


def labels(name: str) -> dict[str, str]:
    found: dict[str, str] = objects()["Deployment", name]["spec"]["template"]["metadata"]["labels"]
    return found


@pytest.mark.parametrize(("place", "selector", "name"), list(selectors()))
def test_selectors_select_the_pods_that_they_mean_and_no_others(place, selector, name):
    other = {"engine-fleet": "engine-router", "engine-router": "engine-fleet"}[name]
    [stateful] = documents("kubernetes/statefulset.yaml")
    single = stateful["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels(name).items()
    assert not selector.items() <= labels(other).items()
    assert not selector.items() <= single.items(), "both kinds can run in one namespace"


def test_ports_are_those_of_the_containers():
    for name in ("engine-fleet", "engine-router"):
        ports = {each["name"]: each["containerPort"] for each in only_container(name)["ports"]}
        service = objects()["Service", name]["spec"]
        assert {each["targetPort"] for each in service["ports"]} <= ports.keys()
        arguments = options(only_container(name)["args"])
        assert int(arguments["--port"]) == ports["http"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert only_container(name)[probe]["httpGet"]["port"] in ports
    router = options(only_container("engine-router")["args"])
    servers = options(only_container("engine-fleet")["args"])
    assert router["--service-discovery-port"] == servers["--port"]
    metrics = {each["name"]: each["containerPort"] for each in only_container("engine-router")["ports"]}[
        "metrics"
    ]
    assert int(router["--prometheus-port"]) == metrics


def test_prometheus_finds_the_servers_under_the_job_of_the_rules():
    monitor = objects()["ServiceMonitor", "engine-fleet"]["spec"]
    service = objects()["Service", "engine-fleet"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["jobLabel"]] == "engine"
    [endpoint] = monitor["endpoints"]
    assert endpoint["port"] in {each["name"] for each in service["spec"]["ports"]}
    keys = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container()["env"]}
    assert endpoint["authorization"]["credentials"] == keys["ENGINE_API_KEY"]


def test_the_router_may_watch_pods_and_has_the_servers_key():
    found = objects()
    account = found["ServiceAccount", "engine-router"]["metadata"]["name"]
    binding, role = found["RoleBinding", "engine-router"], found["Role", "engine-router"]
    assert pod("engine-router")["serviceAccountName"] == account
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    env = {each["name"]: each["valueFrom"] for each in only_container("engine-router")["env"]}
    assert (
        env["ENGINE_API_KEY"]
        == {each["name"]: each["valueFrom"] for each in container()["env"]}["ENGINE_API_KEY"]
    )
    assert env["POD_NAMESPACE"] == {"fieldRef": {"fieldPath": "metadata.namespace"}}
    used = set(re.findall(r"\$\((\w+)\)", " ".join(only_container("engine-router")["args"])))
    assert used == env.keys()


def test_the_router_has_the_options_of_the_documents():
    text = (ROOT / "docs" / "distributed.md").read_text()
    [command] = re.findall(r"^\$ smg launch (?:.*\\\n)*.*", text, re.MULTILINE)
    words = command.replace("\\\n", " ").split()
    given = options(only_container("engine-router")["args"])
    for name in (
        "--worker-startup-check-interval",
        "--health-check-interval-secs",
        "--health-failure-threshold",
        "--load-monitor-interval",
        "--log-level",
    ):
        assert given[name] == words[words.index(name) + 1], name
    assert "--disable-tokenizer-autoload" in given, "the servers' folders are not here"


def test_the_router_has_time_for_its_open_streams():
    spec, router = pod("engine-router"), only_container("engine-router")
    sleep, seconds = router["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    drain = int(options(router["args"])["--shutdown-grace-period-secs"])
    assert spec["terminationGracePeriodSeconds"] >= int(seconds) + drain + ENDING_S
    assert drain >= int(options(container()["args"])["--drain-timeout"])


def test_the_image_of_the_router(tmp_path):
    own = instructions(ROUTER_DOCKERFILE)
    parsed = DockerfileParser(str(tmp_path / "Dockerfile"))
    parsed.content = (DEPLOY / ROUTER_DOCKERFILE).read_text()
    words = [each["instruction"] for each in parsed.structure if each["instruction"] != "COMMENT"]
    assert [word for word, _ in own] == words
    assert [rest for word, rest in own if word == "RUN" and "pip install" in rest] == [
        f"pip install smg=={VERSION}"
    ]
    [kustomization] = documents(f"{FOLDER}/kustomization.yaml")
    assert {each["name"]: each["newTag"] for each in kustomization["images"]}["engine-router"] == VERSION
    last = dict(own[max(i for i, (word, _) in enumerate(own) if word == "FROM") :])
    assert last["USER"] == "{0}:{0}".format(pod("engine-router")["securityContext"]["runAsUser"])
    assert json.loads(last["ENTRYPOINT"]) == ["tini", "--", "smg"]
    assert json.loads(last["CMD"])[0] == only_container("engine-router")["args"][0] == "launch"
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert "/health" in OPEN_PATHS
    assert last["EXPOSE"] == str(only_container("engine-router")["ports"][0]["containerPort"])


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_manifests_render():
    done = subprocess.run(
        ["kubectl", "kustomize", DEPLOY / FOLDER], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert {(each["kind"], each["metadata"]["name"]) for each in rendered} == objects().keys()
    images = {
        each["spec"]["template"]["spec"]["containers"][0]["image"]
        for each in rendered
        if each["kind"] == "Deployment"
    }
    assert images == {"registry.example.org/engine:cpu", f"registry.example.org/engine-router:{VERSION}"}


# ---------------------------------------------------------------- with the real tools


@pytest.mark.slow
@pytest.mark.skipif(not SMG.exists(), reason="smg is not installed: `make routers` installs it")
def test_smg_has_every_option_of_the_router():
    done = subprocess.run([SMG, "launch", "--help"], capture_output=True, text=True, check=True, timeout=120)
    known = set(re.findall(r"--[\w-]+", done.stdout))
    assert options(only_container("engine-router")["args"]).keys() <= known


@pytest.mark.slow
@pytest.mark.skipif(
    not VALIDATE.exists(), reason="kubernetes-validate is not installed: `make validator` installs it"
)
@pytest.mark.parametrize("folder", ["kubernetes", FOLDER])
def test_the_manifests_fit_the_schemas_of_kubernetes(folder, tmp_path):
    """Those of Kubernetes itself; the objects of the Prometheus operator have their schemas in a cluster only."""
    custom = ("Kustomization", "ServiceMonitor", "PrometheusRule")
    names = sorted(str(path.relative_to(DEPLOY)) for path in (DEPLOY / folder).glob("*.yaml"))
    found = [each for name in names for each in documents(name) if each["kind"] not in custom]
    assert len(found) >= 4
    broken = {**found[0], "spec": {**found[0].get("spec", {}), "nonsense": 1}}
    for number, each in enumerate((*found, broken)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(each))
        done = subprocess.run(
            [VALIDATE, "--strict", "-k", "1.37", path],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert (done.returncode == 0) == (each is not broken), (each["kind"], done.stdout, done.stderr)


@pytest.mark.slow
def test_the_steps_of_the_cpu_image_run_in_a_plain_folder(tmp_path):
    """COPY by .dockerignore, the commit, the installation (without what the index has), and the kernels of one CPU."""
    context, installed, cache = tmp_path / "src", tmp_path / "engine", tmp_path / "cache"
    context.mkdir()
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line.startswith("!/"):
            path = ROOT / line.removeprefix("!/")
            if path.is_dir():
                skipped = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(path, context / path.name, ignore=skipped)
            else:
                shutil.copy(path, context)
    (context / "runtime" / "COMMIT").write_text("0123abc\n")

    steps = [rest for word, rest in instructions("docker/cpu.Dockerfile") if word == "RUN"]
    [install] = [step for step in steps if step.endswith("--no-build-isolation .")]
    [compiling] = [step for step in steps if "ISAS" in step]
    assert "constraints.txt" in install
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--no-index", "--target", str(installed), "."],
        cwd=context,
        check=True,
        timeout=300,
    )
    code = re.search(r'python -c "(.*)"$', compiling)
    assert code
    only_one = code[1].replace("if isa != 'portable'", "if isa == 'avx2'")
    assert only_one != code[1]
    env = os.environ | {"PYTHONPATH": str(installed), "ENGINE_CACHE_DIR": str(cache)}
    subprocess.run([sys.executable, "-c", only_one], env=env, cwd=tmp_path, check=True, timeout=600)
    assert list((cache / "kernels").glob("cpu-*.so"))
    version = subprocess.run(
        [sys.executable, "-P", "-m", "engine", "--version"],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert version.stdout.startswith("engine ")
    assert project["project"]["scripts"] == {"engine": "engine.__main__:main"}, "what ENTRYPOINT calls"
