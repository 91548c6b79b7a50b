"""Tokenizer: text to token ids and back, for one model.

Used by the tokenizer manager (encode, chat template), the detokenizer (`token_bytes`) and `LLM`. Read from
tokenizer.json in a model folder or from the vocabulary inside a GGUF file. An instance is immutable, so threads may
share it. The tokenizer manager renders chat templates.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, normalizers
from tokenizers import Tokenizer as CoreTokenizer

from ...runtime.errors import ConfigError, RequestError
from ..fields import Fields
from ..gguf.gguf_file import GGUFFile
from ..gguf.gguf_tokenizer import build_gguf_tokenizer
from ..hf.special_tokens import CONFIG, ListedToken, SpecialTokens, read_special_tokens
from ..hf.task import transformer_fields
from ..model_files import is_panic, library_errors, read_json, stand_in
from ..source import ModelSource
from .chat_templates import DEFAULT, read_chat_templates
from .fim import GGUF_KEYS, find_fim_tokens
from .pairs import EncodedPair, encode_pairs
from .texts_in_tokens import TextsInTokens
from .token_bytes import BYTE_OF_CHAR, TokenBound, TokenBytes, find_token_bound

logger = logging.getLogger(__name__)

_GGUF_NAMES: Final = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # spelled like this in the format
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}
_PROBE: Final = "Is 1 a word?"
"""The library loads some damaged files without an error and panics at the first text; this text finds them."""
_GGUF_EOS_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


class Tokenizer:
    """One model's tokenizer.

    Attributes:
        special_tokens: the named tokens for chat templates ("bos_token", "eos_token", ...) and their text.
        bos_token_id: the token that begins a text, or None.
        eos_token_ids: tokens that end a text or a turn, according to the tokenizer's files; the model's configuration
            may name more (`ModelSpec.eos_token_ids`).
        chat_templates: Jinja sources by name; the usual one is "default".
        fim: the tokens for filling in the middle; None: the model has none.
    """

    def __init__(
        self,
        core: CoreTokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        bos_token_id: int | None = None,
        chat_templates: Mapping[str, str],
        encode_only: bool = False,
        pair_types: bool = True,
        fim_ids: Mapping[str, int] | None = None,
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library.

        Args:
            encode_only: of a model that generates no text.
            pair_types: the model gets the types of a pair's tokens.
            fim_ids: tokens for filling in the middle that a file names, by the fields of `FimTokens`.

        Raises:
            ConfigError: its decoder is of a kind that cannot map tokens to bytes (WordPiece and others), which a model
                that generates text needs.
        """
        self._core = core
        # Files often contain the limits of the training script, which would truncate prompts silently.
        core.no_truncation()
        core.no_padding()
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.chat_templates = dict(chat_templates)
        self._pair_types = pair_types
        self.fim = find_fim_tokens(core.token_to_id, fim_ids or {})
        added = core.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_bytes = TokenBytes(core)
        if not (encode_only or self._token_bytes.is_exact):
            found = ", ".join(sorted(self._token_bytes.decoder_kinds)) or "none"
            raise ConfigError(
                f"the tokenizer's decoder is of an unsupported kind ({found}); "
                "supported are byte-level BPE and SentencePiece with byte fallback"
            )

    @classmethod
    def from_folder(cls, folder: Path, *, encode_only: bool = False) -> Tokenizer:
        """Read tokenizer.json, and the special tokens and chat templates of the files beside it.

        tokenizer.json decides whether BOS is added: like transformers 5, this ignores `add_bos_token` of the other
        file.

        Args:
            folder: the model's.
            encode_only: the model generates no text.

        Raises:
            ConfigError: a file is missing or broken; the message says which and what to do.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ConfigError(_no_tokenizer(folder))
        if (found := stand_in(path)) is not None:
            raise ConfigError(f"{path}: it is {found}")
        with library_errors(f"{path}: not a valid tokenizer (", "); download it again"):
            core = CoreTokenizer.from_file(str(path))
            core.encode_batch_fast([_PROBE])
        if encode_only:
            _add_lower_case(core, transformer_fields(folder))
        special = read_special_tokens(folder)
        _add_tokens(core, special, folder / CONFIG)
        config_path = folder / CONFIG
        config = Fields(config_path, read_json(config_path) if config_path.exists() else {})
        eos = core.token_to_id(special.named.get("eos_token", ""))
        templates = read_chat_templates(folder, config)
        try:
            return cls(
                core,
                special_tokens=special.named,
                eos_token_ids=() if eos is None else (eos,),
                bos_token_id=core.token_to_id(special.named.get("bos_token", "")),
                chat_templates=templates,
                encode_only=encode_only,
                pair_types=_gives_types(config),
            )
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    @classmethod
    def from_gguf(cls, file: GGUFFile) -> Tokenizer:
        """Build the tokenizer from a GGUF file's vocabulary.

        Raises:
            ConfigError: the file has none, or one that is damaged or not supported.
        """
        core = build_gguf_tokenizer(file)
        fields = Fields(file.path, file.metadata)
        size = core.get_vocab_size()
        named = {
            name: fields.known_token_id(f"tokenizer.ggml.{key}_token_id", size)
            for name, key in _GGUF_NAMES.items()
        }
        eos = [i for key in _GGUF_EOS_KEYS for i in fields.token_ids(f"tokenizer.ggml.{key}", size)]
        return cls(
            core,
            special_tokens={
                name: core.id_to_token(token_id) or ""
                for name, token_id in named.items()
                if token_id is not None
            },
            eos_token_ids=tuple(dict.fromkeys(eos)),
            bos_token_id=named["bos_token"],
            chat_templates=_gguf_chat_templates(file.metadata),
            fim_ids={
                field: token_id
                for field, keys in GGUF_KEYS.items()
                for key in reversed(keys)
                if (token_id := fields.known_token_id(f"tokenizer.ggml.{key}", size)) is not None
            },
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the model's logits may be wider (padding of the embedding)."""
        return self._core.get_vocab_size()

    def first_difference(self, other: Tokenizer) -> int | None:
        """The first token id with another text in `other`, among those that both have; None: there is none."""
        own, theirs = (each._core.get_vocab(with_added_tokens=True) for each in (self, other))
        known = {token_id: token for token, token_id in theirs.items()}
        return min(
            (token_id for token, token_id in own.items() if known.get(token_id, token) != token), default=None
        )

    def token(self, token_id: int) -> str | None:
        """The text of a token as the vocabulary has it; None if there is no such token."""
        return self._core.id_to_token(token_id)

    def to_json(self) -> str:
        """The content of a tokenizer.json that gives the same tokens."""
        return self._core.to_str()

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, or None for a model that has none."""
        return self.chat_templates.get(DEFAULT)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in it are recognized.

        Args:
            text: any string that has a UTF-8 form.
            add_special_tokens: put BOS before it (and EOS after it) if the model requires it; False for a rendered
                chat template, which contains them already.

        Raises:
            RequestError: the text has a lone surrogate.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of several texts in one call; see `encode`.

        Raises:
            RequestError: a text has a lone surrogate.
        """
        with _encoding_errors(texts):
            # A batch, even of one, releases the GIL; `encode` holds it for 0.4 s per MB of text. Without offsets
            # ("fast") it takes four fifths of the time.
            encodings = self._core.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None = None
    ) -> list[EncodedPair]:
        """Token ids of pairs of texts, with special tokens; see `encode_pairs` of `tokenizer_files/pairs`.

        Raises:
            RequestError: a text has a lone surrogate.
        """
        with _encoding_errors(text for pair in pairs for text in pair):
            encoded = encode_pairs(self._core, pairs, max_length)
        return encoded if self._pair_types else [pair._replace(second_start=0) for pair in encoded]

    def min_num_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of `text`, without tokenizing it; 0 if no bound is certain."""
        bound = self._token_bound
        return 0 if bound is None else bound.min_tokens(text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; invalid UTF-8 becomes U+FFFD, ids outside the vocabulary become empty.

        The number of U+FFFD is that of the library. For a SentencePiece model each token is one, in a run of byte
        tokens that is not valid UTF-8; for others an invalid sequence is one, as in `IncrementalDecoder` for both.

        Raises:
            RequestError: an id is negative or beyond 32 bits.
        """
        try:
            # A batch releases the GIL here, too.
            return self._core.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except OverflowError:
            raise RequestError("a token id is negative or beyond 32 bits") from None

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token: the bytes of a text's tokens, joined, are the text's UTF-8.

        An id without a token (padding of the embedding) has no bytes. One exception: SentencePiece models put a space
        before a text, which is the first byte of the first token. With `encode_only` they may be for show only, see
        `TokenBytes`.
        """
        return self._token_bytes.of(token_id)

    def left_out(self, text: str, ids: Sequence[int]) -> dict[str, int]:
        """Characters of `text` that its tokens `ids` leave out, and how often, sorted.

        Published byte-level vocabularies lack some control characters. The library drops them without an error.
        """
        missing = self._token_bytes.without_token
        data = text.encode("utf-8", "surrogatepass")
        if len(data.translate(None, missing)) == len(data):
            return {}
        kept = b"".join(map(self.token_bytes, ids))
        encoded = {char: char.encode("utf-8", "surrogatepass") for char in sorted(set(text))}
        lost = {
            char: data.count(form) - kept.count(form)
            for char, form in encoded.items()
            if not set(missing).isdisjoint(form)
        }
        return {char: count for char, count in lost.items() if count > 0}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not part of the visible text."""
        return token_id in self._special_ids

    def token_to_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        return self._core.token_to_id(token)

    @functools.cached_property
    def texts(self) -> TextsInTokens:
        """The tokens of texts that a request names, see the class."""
        encode = functools.partial(self.encode, add_special_tokens=False)
        return TextsInTokens(self.vocab_size, self.token_bytes, encode)

    @functools.cached_property
    def special_ending(self) -> list[int]:
        """The special tokens that `encode` puts after a text."""
        bare, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        num_added = len(whole) - len(bare)
        num_before = next(i for i in range(num_added + 1) if whole[i : i + len(bare)] == bare)
        return whole[num_before + len(bare) :]

    @functools.cached_property
    def _token_bound(self) -> TokenBound | None:
        return find_token_bound(self._core, BYTE_OF_CHAR)


def load_tokenizer(source: ModelSource, *, encode_only: bool = False) -> Tokenizer:
    """Read the tokenizer from a model's files.

    Args:
        source: the files.
        encode_only: the model generates no text (`ModelSpec.pooling`), so any kind of vocabulary will do.

    Raises:
        ConfigError: there is none, or it is broken or not supported.
    """
    if source.kind == "gguf":
        return Tokenizer.from_gguf(GGUFFile(source.path))
    return Tokenizer.from_folder(Path(source.path), encode_only=encode_only)


@contextmanager
def _encoding_errors(texts: Iterable[str]) -> Iterator[None]:
    """The errors of the library about one of these texts as errors of the request."""
    try:
        yield
    except TypeError:
        for text in texts:
            _check_unicode(text)
        raise
    except BaseException as error:
        if is_panic(error):
            message = f"the model's tokenizer fails on this text: {error}"
            raise RequestError(message, code="tokenizer_failed", status=500) from None
        raise


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate at character {error.start}; send valid Unicode"
        ) from None


def _no_tokenizer(folder: Path) -> str:
    """Reason why a folder has no supported tokenizer, with a fix."""
    for name in ("tokenizer.model", "vocab.json", "spiece.model"):
        if (folder / name).exists():
            return (
                f"{folder}: there is no tokenizer.json, only {name}; convert it once with transformers: "
                f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
    return f"{folder}: there is no tokenizer.json; copy it from the model's page into this folder"


def _gives_types(config: Fields) -> bool:
    """Whether transformers gives the model the types of tokens; its plain tokenizer stopped that with version 5."""
    names = config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return config.get("tokenizer_class") != "TokenizersBackend"


def _add_lower_case(core: CoreTokenizer, settings: Fields) -> None:
    """Fold case before all else if sentence-transformers does; most tokenizers fold it themselves."""
    if not settings.boolean("do_lower_case", default=False):
        return
    own = core.normalizer
    if own is None or b'"Lowercase"' not in own.__getstate__():
        core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([] if own is None else [own])])


def _add_tokens(core: CoreTokenizer, special: SpecialTokens, path: Path) -> None:
    """Match all listed tokens as a whole, with the flags of the list, as transformers does.

    A token keeps its id in tokenizer.json. One that is missing there is added only if it gets the id of the list.
    """
    added = {token.content: token for token in core.get_added_tokens_decoder().values()}
    named = set(special.named.values())
    missing: list[ListedToken] = []
    changed: list[AddedToken] = []
    for token in special.listed:
        old = added.get(token.content)
        if not token.content or (token.token_id is None and old is not None and token.content not in named):
            continue
        if token.token_id is None and old is not None:
            new = old
        else:
            flags = {"normalized": not token.flags.get("special", False), **token.flags}
            new = AddedToken(token.content, **flags)
        new.special = new.special or token.content in named
        if core.token_to_id(token.content) is None:
            missing.append(token)
        else:
            changed.append(new)
        added[token.content] = new
    core.add_tokens(changed)
    for token in sorted(missing, key=lambda token: token.token_id or 0):
        if token.token_id == core.get_vocab_size():
            core.add_tokens([added[token.content]])
        elif token.token_id is not None:
            logger.warning(
                "%s: the token %r with the id %d is not in tokenizer.json; it is not known",
                path,
                token.content,
                token.token_id,
            )


def _gguf_chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default template, `tokenizer.chat_template.NAME` a named one."""
    key = "tokenizer.chat_template"
    named = {k.removeprefix(f"{key}."): v for k, v in metadata.items() if k.startswith(f"{key}.")}
    templates = {name: value for name, value in named.items() if isinstance(value, str)}
    default = metadata.get(key)
    return templates | {"default": default} if isinstance(default, str) else templates
