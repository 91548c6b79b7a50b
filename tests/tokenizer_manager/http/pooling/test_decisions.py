"""`POST /v1/decisions` and `/v1/systemone`: prompts, answers in both forms, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import openai
import pytest

from engine.cli import main
from engine.runtime.decision_calibration import read_calibration
from engine.runtime.messages import GenerateRequest
from engine.runtime.pooling import PoolingKind

from ...conftest import Serve, Served
from ...conversation import chat_templates
from ...fake_engine import CAPACITY, TOKENIZER, ids_of, make_tokenizer, say_vectors

PREDICATE = {"type": "predicate", "instructions": "It is late."}
CHOICE = {
    "type": "choice",
    "name": "who",
    "instructions": [{"type": "input_text", "text": "Who?"}, {"type": "input_json", "data": {"a": 1}}],
    "choices": [{"value": "true"}, {"value": True, "description": "for sure"}, {"value": "no"}],
}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "low"}, {"label": "high"}]}
SHARES = {"y": 0.3, "Y": 0.3, "n": 0.2, "A": 0.1, "B": 0.6, "b": 0.1, "0": 0.25, "1": 0.5}
"""The next token of the model, for every prompt."""


def vector_of(request: GenerateRequest) -> list[float]:
    assert request.pooling is not None and request.pooling.kind is PoolingKind.LABELS
    shares = [SHARES.get(TOKENIZER.token_bytes(each).decode(), 0.0) for each in request.pooling.label_ids]
    return [math.log(share) if share else -math.inf for share in shares]


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve(say_vectors(vector_of))


def text_of(request: GenerateRequest) -> str:
    return TOKENIZER.decode(ids_of(request), False)


def refused(served: Served, path: str, **fields: Any) -> dict[str, Any]:
    usual: dict[str, dict[str, Any]] = {
        "/v1/decisions": {"input": "x", "questions": [PREDICATE]},
        "/v1/systemone": {"state": "x", "questions": {"a": {"type": "noul", "instructions": "y"}}},
    }
    response = served.client.post(path, json=usual[path] | fields)
    assert response.status_code == 400
    error: dict[str, Any] = response.json()["error"]
    return error


def test_every_kind_through_the_official_client(served: Served):
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0)

    decision = client.decisions.create(
        model="",
        input="The sky is dark.",
        questions=[PREDICATE, CHOICE, SCORE],  # type: ignore[list-item]
    )

    predicate, choice, score = decision.answers
    assert predicate.type == "predicate" and predicate.name is None
    assert predicate.probability == pytest.approx(0.75)
    assert choice.type == "choice" and choice.name == "who"
    assert choice.choice is True
    assert [each.value for each in choice.probabilities] == ["true", True, "no"]
    assert [each.probability for each in choice.probabilities] == pytest.approx([0.125, 0.875, 0.0])
    assert choice.confidence == pytest.approx((0.875 - 1 / 3) / (1 - 1 / 3))
    assert score.type == "score"
    assert score.score == pytest.approx(2 / 3)
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "low"), (1, "high")]
    masses = [answer["label_mass"] for answer in decision.model_dump()["answers"]]
    assert masses == pytest.approx([0.8, 0.8, 0.75])
    prompts = [text_of(served.engine.next_request()) for _ in range(3)]
    begin, end = "<|im_start|>user\nThe sky is dark.\n\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert all(prompt.startswith(begin) and prompt.endswith(end) for prompt in prompts)
    assert 'Who?\n{"a": 1}\n\nA. true\nB. true: for sure\nC. no' in prompts[1]
    assert decision.usage.input_tokens == sum(map(len, map(TOKENIZER.encode, prompts)))
    assert (decision.usage.output_tokens, decision.usage.output_tokens_details.reasoning_tokens) == (0, 0)


def test_system_one(served: Served):
    questions = {
        "late": {"type": "noul", "instructions": "It is late.", "criteria": {"true": "after ten"}},
        "who": {"type": "choice", "instructions": "Who?", "criteria": {"you": None, "me": "the author"}},
        "much": {"type": "score", "instructions": {"ask": "How much?"}, "criteria": ["low", "high"]},
    }

    body = served.client.post("/v1/systemone", json={"state": {"sky": "dark"}, "questions": questions}).json()

    late, who, much = (body["answers"][name] for name in questions)
    assert late == {"type": "noul", "noul": pytest.approx(0.75), "x_label_mass": pytest.approx(0.8)}
    assert (who["choice"], who["probabilities"]["you"]) == ("me", pytest.approx(0.125))
    assert much["score"] == pytest.approx(2 / 3) and much["legend"] == {"0": "low", "1": "high"}
    assert much["probabilities"] == {"0": pytest.approx(1 / 3), "1": pytest.approx(2 / 3)}
    prompts = [text_of(served.engine.next_request()) for _ in questions]
    assert all(prompt.startswith('<|im_start|>user\n{"sky": "dark"}\n\n') for prompt in prompts)
    assert (
        "Y: after ten" in prompts[0]
        and "B. me: the author" in prompts[1]
        and '{"ask": "How much?"}' in prompts[2]
    )


def test_an_input_of_messages_calls_and_outputs(served: Served):
    items = [
        {"role": "developer", "content": "Be fair."},
        {"role": "user", "content": [{"type": "input_text", "text": "Look it up."}]},
        {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ]

    served.client.post("/v1/decisions", json={"input": items, "questions": [PREDICATE]}).raise_for_status()

    prompt = text_of(served.engine.next_request())
    assert prompt.startswith("<|im_start|>system\nBe fair.") and "found" in prompt
    assert prompt.index("found") < prompt.index("It is late.")


def test_a_model_without_a_template_reads_input_question_and_the_word_answer(serve: Serve):
    served = serve(say_vectors(vector_of), chat_template=None)

    served.client.post("/v1/decisions", json={"input": "Dark.", "questions": [PREDICATE]}).raise_for_status()

    prompt = text_of(served.engine.next_request())
    assert prompt == "Dark.\n\nIt is late.\n\nIs it true? Answer with Y or N only.\n\nAnswer:"


def test_permutations_ask_in_several_orders_and_return_the_mean(served: Served):
    body = {"input": "x", "questions": [CHOICE, PREDICATE], "permutations": 3}

    [choice, predicate] = served.client.post("/v1/decisions", json=body).json()["answers"]

    # The model prefers B, whatever it is: each choice is B once.
    assert [each["probability"] for each in choice["probabilities"]] == pytest.approx([1 / 3] * 3)
    assert predicate["probability"] == pytest.approx(0.75)
    prompts = [text_of(served.engine.next_request()) for _ in range(4)]
    assert [prompt.split("B. ")[1].split("\n")[0] for prompt in prompts[:3]] == [
        "true: for sure",
        "no",
        "true",
    ]


def test_a_small_label_mass_is_a_refusal_where_it_is_asked_for(served: Served):
    body = {"input": "x", "questions": [PREDICATE | {"name": "p"}, SCORE], "min_label_mass": 0.78}

    [predicate, score] = served.client.post("/v1/decisions", json=body).json()["answers"]

    assert predicate["type"] == "predicate"
    assert score == {"type": "refusal", "name": None, "label_mass": pytest.approx(0.75)}


def test_the_tokens_of_prompt_and_labels_are_returned_when_asked_for(served: Served):
    body = {"input": "x", "questions": [SCORE], "return_prompt_token_ids": True}

    [score] = served.client.post("/v1/decisions", json=body).json()["answers"]

    assert score["prompt_token_ids"] == ids_of(served.engine.next_request())
    assert score["label_token_ids"] == [TOKENIZER.encode("0"), TOKENIZER.encode("1")]


@pytest.mark.parametrize(
    ("questions", "param"),
    [
        ([], "questions"),
        ([PREDICATE] * 401, "questions"),
        ([PREDICATE, {"type": "noul", "instructions": "x"}], "questions[1].type"),
        ([{"type": "predicate"}], "questions[0].instructions"),
        ([PREDICATE | {"instructions": " "}], "questions[0].instructions"),
        ([PREDICATE | {"color": "red"}], "questions[0]"),
        ([PREDICATE | {"name": "a"}, CHOICE | {"name": "a"}], "questions[1].name"),
        ([CHOICE | {"choices": [{"value": "a"}]}], "questions[0].choices"),
        ([CHOICE | {"choices": [{"value": str(i)} for i in range(256)]}], "questions[0].choices"),
        (
            [CHOICE | {"choices": [{"value": "a"}, {"value": "b"}, {"value": "a"}]}],
            "questions[0].choices[2].value",
        ),
        ([PREDICATE, CHOICE | {"choices": [{"value": str(i)} for i in range(27)]}], "questions[1]"),
        ([SCORE | {"levels": [{"label": str(i)} for i in range(11)]}], "questions[0].levels"),
        (
            [PREDICATE | {"instructions": [{"type": "input_image", "image_url": "data:,"}]}],
            "questions[0].instructions[0].type",
        ),
    ],
)
def test_a_refused_question_is_named_by_its_path(served: Served, questions: list[Any], param: str):
    error = refused(served, "/v1/decisions", questions=questions)

    assert error["param"] == param, error
    assert served.engine.generate.empty()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/decisions", {"input": ""}, "input"),
        (
            "/v1/decisions",
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ("/v1/decisions", {"temperature": 0}, "temperature"),
        ("/v1/decisions", {"permutations": 0}, "permutations"),
        ("/v1/decisions", {"min_label_mass": 1.5}, "min_label_mass"),
        ("/v1/systemone", {"state": ""}, "state"),
        ("/v1/systemone", {"questions": {}}, "questions"),
        (
            "/v1/systemone",
            {"questions": {"a": {"type": "choice", "instructions": "x", "criteria": {"b": None}}}},
            "questions",
        ),
        (
            "/v1/systemone",
            {"questions": {"a": {"type": "score", "instructions": "x", "criteria": ["b"]}}},
            "questions",
        ),
    ],
)
def test_a_refused_value_is_named_by_its_path(served: Served, path: str, fields: dict[str, Any], param: str):
    assert refused(served, path, **fields)["param"] == param


def test_a_question_beyond_the_context_is_named(served: Served):
    long = PREDICATE | {"instructions": "x" * 300}

    assert refused(served, "/v1/decisions", questions=[PREDICATE, long])["param"] == "questions[1]"
    questions = {"a": {"type": "noul", "instructions": "x"}, "b": {"type": "noul", "instructions": "x" * 300}}
    error = refused(served, "/v1/systemone", questions=questions)
    assert error["param"] == "questions" and error["message"].startswith(
        "questions.b "
    )  # the log has only the field


def test_the_only_question_is_named(served: Served):
    long = PREDICATE | {"instructions": "x" * 300}

    assert refused(served, "/v1/decisions", questions=[long])["param"] == "questions[0]"


def test_the_end_of_a_prompt_is_never_cut(served: Served):
    for name, value in (("truncate_prompt_tokens", 5), ("truncate", True)):
        assert refused(served, "/v1/decisions", **{name: value})["param"] == name


def test_more_prompts_than_a_request_may_have_are_refused(serve: Serve, monkeypatch):
    served = serve(say_vectors(vector_of), limits={"max_prompts": 4})
    many = refused(served, "/v1/decisions", questions=[CHOICE, SCORE, PREDICATE], permutations=255)
    assert many["param"] == "permutations" and "has 5 prompts" in many["message"]
    assert refused(served, "/v1/decisions", questions=[PREDICATE] * 5)["param"] == "questions"

    monkeypatch.setattr("engine.tokenizer_manager.http.pooling.decisions._MAX_CHARS", 300)
    long = refused(served, "/v1/decisions", input="x" * 70, questions=[PREDICATE] * 4)
    assert (long["param"], long["code"]) == ("input", "input_too_large")
    assert served.engine.generate.empty()


TONED = (
    "{% for message in messages %}{{ message.content }}{% endfor %}[{{ tone }}]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
)


def test_thinking_is_off_and_variables_reach_the_template(serve: Serve):
    served = serve(say_vectors(vector_of), chat_template=TONED)
    body = {"input": "x", "questions": [PREDICATE], "chat_template_kwargs": {"tone": "low"}}

    served.client.post("/v1/decisions", json=body).raise_for_status()

    assert text_of(served.engine.next_request()).endswith(" only.[low]<think>\n\n</think>")


ROOMY = msgspec.structs.replace(CAPACITY, max_model_len=512, num_pages=256)
THOUGHT = "<think>\n\n</think>\n\n"
CLOSED = {
    "APERTUS": "<|user_end|><|assistant_start|><|inner_prefix|><|inner_suffix|>",
    "APRIEL": "\n<|begin_assistant|>\nHere are my reasoning steps:\n\n[BEGIN FINAL RESPONSE]\n",
    "DEEPSEEK_R1": f"<｜Assistant｜>{THOUGHT}",
    "GPT_OSS": "<|end|><|start|>assistant<|channel|>analysis<|message|><|end|><|start|>assistant"
    "<|channel|>final<|message|>",
    "KIMI_K2_IDS": f"<|im_end|><|im_assistant|>assistant<|im_middle|>{THOUGHT}",
    "SEED_OSS": "</s><s>assistant\n<seed:think></seed:think>",
}
"""The end of a prompt after its question, of templates that cannot turn reasoning off."""
OPEN = {
    "COMMAND_A": "<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>"
    "<|START_RESPONSE|>",
    "DEEPSEEK_V4": "<｜Assistant｜></think>",
    "GEMMA4": "<turn|>\n<|turn>model\n",
    "GLM45": "<|assistant|>\n<think></think>",
    "GRANITE33": "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "KIMI_K2": "<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "LFM2": "<|im_end|>\n<|im_start|>assistant\n",
    "LLAMA31": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "MISTRAL": "[/INST]",
    "QWEN3": f"<|im_end|>\n<|im_start|>assistant\n{THOUGHT}",
    "QWEN3_CODER": "<|im_end|>\n<|im_start|>assistant\n",
    "SMOLLM2": "<|im_end|>\n<|im_start|>assistant\n",
}


def test_every_template_of_the_list_is_tested():
    assert {name for name in vars(chat_templates) if name.isupper()} == CLOSED.keys() | OPEN.keys()


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", [*CLOSED, *OPEN])
def test_a_public_template_has_the_question_last_and_the_answer_next(serve: Serve, name: str):
    names = "{%- set bos_token, eos_token = '<s>', '</s>' %}"
    template = names + getattr(chat_templates, name)
    served = serve(say_vectors(vector_of), chat_template=template, capacity=ROOMY)
    body = {"input": "The sky is dark.", "questions": [PREDICATE, SCORE]}

    answer = served.client.post("/v1/decisions", json=body).raise_for_status().json()

    prompts = [text_of(served.engine.next_request()) for _ in range(2)]
    shared = prompts[0].partition("It is late.")[0]
    assert shared.endswith("The sky is dark.\n\n") and prompts[1].startswith(shared)
    assert [prompt.partition(" only.")[2] for prompt in prompts] == [(CLOSED | OPEN)[name]] * 2
    warned = "cannot turn its reasoning off" in "".join(answer.get("warnings", ()))
    assert warned == (name in CLOSED)


def test_a_template_that_changes_the_question_is_refused(serve: Serve):
    loud = "{% for message in messages %}{{ message.content | upper }}{% endfor %}"
    twice = "{% for message in messages %}{{ message.content }}{{ message.content }}{% endfor %}"
    for template in (loud, twice):
        error = refused(serve(say_vectors(vector_of), chat_template=template), "/v1/decisions")
        assert (error["param"], error["code"]) == ("input", "unsupported_template")


def test_only_a_prompt_without_a_template_gets_a_bos(serve: Serve):
    for template, start in ((TONED, "x"), (None, "<|im_start|>x")):
        served = serve(
            say_vectors(vector_of), chat_template=template, tokenizer=make_tokenizer(adds_bos=True)
        )
        served.client.post("/v1/decisions", json={"input": "x", "questions": [PREDICATE]}).raise_for_status()
        assert text_of(served.engine.next_request()).startswith(f"{start}\n\n")


def test_fewer_orders_than_options_are_apart(served: Served):
    choices = [{"value": value} for value in ("north", "east", "south", "west")]
    body = {"input": "x", "questions": [CHOICE | {"choices": choices}], "permutations": 2}

    served.client.post("/v1/decisions", json=body).raise_for_status()

    prompts = [text_of(served.engine.next_request()) for _ in range(2)]
    assert [prompt.split("A. ")[1].split("\n")[0] for prompt in prompts] == ["north", "south"]


def test_a_temperature_flattens_probabilities(served: Served):
    body = {"input": "x", "questions": [PREDICATE], "temperature": 2.0}

    [answer] = served.client.post("/v1/decisions", json=body).json()["answers"]

    yes, no = math.sqrt(0.6), math.sqrt(0.2)
    assert answer["probability"] == pytest.approx(yes / (yes + no))
    assert answer["label_mass"] == pytest.approx(0.8)


def test_a_calibration_gives_the_temperature_unless_the_request_has_one(serve: Serve):
    served = serve(say_vectors(vector_of), calibration={"predicate": 2.0, "choice": 9.0, "choice.3": 0.5})
    body = {"input": "x", "questions": [PREDICATE, CHOICE, SCORE]}

    def asked(**fields: Any) -> list[Any]:
        answers: list[Any] = served.client.post("/v1/decisions", json=body | fields).json()["answers"]
        return answers

    predicate, choice, score = asked()
    yes, no = math.sqrt(0.6), math.sqrt(0.2)
    assert predicate["probability"] == pytest.approx(yes / (yes + no))
    assert choice["probabilities"][1]["probability"] == pytest.approx(0.49 / 0.5)  # that of choice.3
    assert score["score"] == pytest.approx(2 / 3)  # no temperature: 1
    predicate, choice, score = asked(temperature=1)
    assert predicate["probability"] == pytest.approx(0.75)
    assert choice["probabilities"][1]["probability"] == pytest.approx(0.875)


def test_a_fitted_file_is_one_that_a_server_reads(serve: Serve, tmp_path, capsys):
    served = serve(say_vectors(vector_of), calibration={"predicate": 50.0})
    labeled, fitted = tmp_path / "labeled.jsonl", tmp_path / "fitted.json"
    # The model says 3 : 1, and is right in 9 of 10 questions: sqrt(9 / 3) : 1 at half the temperature.
    lines = [
        {"input": "x", "questions": [PREDICATE | {"answer": answer}, CHOICE | {"answer": True}]}
        for answer in [True] * 9 + [False]
    ]
    labeled.write_text("\n".join(map(json.dumps, lines)))

    assert main.run(["decisions", "fit", str(labeled), "-o", str(fitted), "--url", served.url]) == 0

    found = read_calibration(str(fitted))
    assert list(found) == ["choice", "choice.3", "predicate"]
    assert found["predicate"] == pytest.approx(0.5, abs=1e-3)
    shown = next(line.split() for line in capsys.readouterr().out.splitlines() if "predicate" in line)
    before = -0.9 * math.log(0.75) - 0.1 * math.log(0.25)
    after = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert shown == [
        "predicate.2",
        "10",
        f"{found['predicate']:g}",
        *(f"{x:.4f}" for x in (before, after, 0.15, 0)),
    ]


def test_an_embedder_cannot_decide(serve: Serve):
    from .test_rerank import HEAD, LENGTH

    for template in (TONED, None):
        error = refused(serve(LENGTH, pooling=HEAD, chat_template=template), "/v1/decisions")
        assert error["code"] == "unsupported_task"
