"""Every file of `deploy/` can be read by what it is for, as far as the tools are here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from engine.model_runner.kernels.cpu import build as build_module
from engine.model_runner.kernels.cpu.compiler import ISAS

from .places import DEPLOY, DOCKERFILES, compose_engine, documents, instructions

YAML_FILES = sorted(str(path.relative_to(DEPLOY)) for path in DEPLOY.rglob("*.yaml"))
INSTRUCTIONS = {
    "ARG",
    "CMD",
    "COPY",
    "ENTRYPOINT",
    "ENV",
    "EXPOSE",
    "FROM",
    "HEALTHCHECK",
    "RUN",
    "STOPSIGNAL",
} | {
    "USER",
    "VOLUME",
    "WORKDIR",
}
ROOT = DEPLOY.parent


@pytest.mark.parametrize("name", YAML_FILES)
def test_yaml_can_be_read_and_has_no_key_twice(name):
    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[object, object]:
        keys = [loader.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), keys
        return {
            loader.construct_object(k, deep=True): loader.construct_object(v, deep=True)
            for k, v in node.value
        }

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    with (DEPLOY / name).open() as file:
        assert all(isinstance(each, dict) for each in yaml.load_all(file, Loader))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfiles(name, tmp_path):
    """Also as an independent parser reads them."""
    own = instructions(name)
    parsed = DockerfileParser(str(tmp_path / "Dockerfile"))
    parsed.content = (DEPLOY / name).read_text()

    assert [word for word, _ in own] == [
        each["instruction"] for each in parsed.structure if each["instruction"] != "COMMENT"
    ]
    assert {word for word, _ in own} <= INSTRUCTIONS
    last = own[max(i for i, (word, _) in enumerate(own) if word == "FROM") :]
    of = dict(last)
    assert of["USER"] == "10001:10001"
    assert json.loads(of["ENTRYPOINT"]) == ["tini", "--", "engine"]
    assert of["STOPSIGNAL"] == "SIGTERM"
    check = json.loads(of["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "HEALTHCHECK", "exec")
    assert "http://127.0.0.1:30000/health" in check[2]
    assert of["EXPOSE"] == "30000"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_dockerfiles_copy_is_in_their_context(name):
    """`.dockerignore` lets in the packages and what pip needs, and all of them."""
    allowed = {
        line.removeprefix("!/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!/")
    }
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "docs"}
    needed = {"LICENSE", "README.md", "__init__.py", "__main__.py", "py.typed", "pyproject.toml"} | packages
    assert needed <= allowed
    assert all((ROOT / each).exists() for each in allowed)
    copied = {rest.split()[0] for word, rest in instructions(name) if word == "COPY" and "--from" not in rest}
    assert copied <= allowed | {"."}


def test_the_image_for_cpus_has_kernels_for_every_cpu(monkeypatch):
    [run] = [rest for word, rest in instructions("docker/cpu.Dockerfile") if word == "RUN" and "ISAS" in rest]
    built: list[str] = []
    monkeypatch.setattr(build_module, "build", built.append)

    code = re.search(r'python -c "(.*)"$', run)
    assert code
    exec(code[1], {})  # noqa: S102  (the code of the image)

    assert built == [isa for isa in ISAS if isa != "portable"]


def test_what_the_composed_containers_mount_is_there():
    [found] = documents("docker/compose.yaml")
    folder = DEPLOY / "docker"
    for service in found["services"].values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in found["volumes"] or (folder / source).is_file(), mount
    build = compose_engine()["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "docker/cpu.Dockerfile"
    [override] = documents("docker/compose.cuda.yaml")
    assert (ROOT / override["services"]["engine"]["build"]["dockerfile"]).is_file()


def test_the_mounts_of_the_containers_are_folders_of_the_image():
    env = " ".join(rest for word, rest in instructions("docker/cpu.Dockerfile") if word == "ENV")
    assert "ENGINE_CACHE_DIR=/var/cache/engine " in env + " "
    [stateful] = documents("kubernetes/statefulset.yaml")
    [mounts] = [each["volumeMounts"] for each in stateful["spec"]["template"]["spec"]["containers"]]
    names = {each["name"] for each in stateful["spec"]["template"]["spec"]["volumes"]}
    names |= {each["metadata"]["name"] for each in stateful["spec"]["volumeClaimTemplates"]}
    assert {each["name"] for each in mounts} == names
    paths = {each["mountPath"] for each in mounts}
    assert "/var/cache/engine/models" in paths
    assert "/var/cache/engine" not in paths  # it would hide the image's kernels


def test_kubernetes_files_are_listed_and_select_the_pods():
    [kustomization] = documents("kubernetes/kustomization.yaml")
    present = {path.name for path in (DEPLOY / "kubernetes").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(kustomization["resources"]) == present
    [stateful] = documents("kubernetes/statefulset.yaml")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    services = documents("kubernetes/service.yaml")
    [budget] = documents("kubernetes/poddisruptionbudget.yaml")
    assert stateful["spec"]["serviceName"] in {each["metadata"]["name"] for each in services}
    selectors = [each["spec"]["selector"] for each in services]
    selectors += [stateful["spec"]["selector"]["matchLabels"], budget["spec"]["selector"]["matchLabels"]]
    assert all(selector.items() <= labels.items() for selector in selectors)
    [monitor] = documents("kubernetes/servicemonitor.yaml")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    [scraped] = [each for each in services if wanted <= each["metadata"].get("labels", {}).items()]
    assert monitor["spec"]["endpoints"][0]["port"] in {each["name"] for each in scraped["spec"]["ports"]}
    assert scraped["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "engine"  # the rules' job


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_manifests_render():
    rendered = list(yaml.safe_load_all(run("kubectl", "kustomize", str(DEPLOY / "kubernetes"))))
    kinds = sorted(each["kind"] for each in rendered)
    assert kinds == [
        "PodDisruptionBudget",
        "PrometheusRule",
        "Service",
        "Service",
        "ServiceMonitor",
        "StatefulSet",
    ]
    [image] = {
        each["spec"]["template"]["spec"]["containers"][0]["image"]
        for each in rendered
        if each["kind"] == "StatefulSet"
    }
    assert image == "registry.example.org/engine:cpu"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_option_of_the_unit(tmp_path):
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    path = tmp_path / "engine.service"
    text = (DEPLOY / "systemd/engine.service").read_text()
    path.write_text(text.replace("/opt/engine/bin/engine", str(program)))
    drop_in = tmp_path / "engine.service.d" / "cuda.conf"
    drop_in.parent.mkdir()
    drop_in.write_text((DEPLOY / "systemd/cuda.conf").read_text())

    done = subprocess.run(
        ["systemd-analyze", "verify", path], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_names_every_folder():
    text = Path(DEPLOY / "README.md").read_text()
    folders = [path.name for path in DEPLOY.iterdir() if path.is_dir()]
    assert all(f"| `{name}/` |" in text for name in folders)
