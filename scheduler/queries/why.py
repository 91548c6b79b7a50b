"""`explain`: why a request waited, started, was retracted or ended, in one sentence and a table.

It reads only the decision log, live or from a file, so both give the same answer. Reading the whole live log costs some
milliseconds; it happens only on request.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from ...runtime.messages import Explanation
from ...runtime.text import counted
from ..records.decision_log import Arrived, DecisionRecord, Finished, Handover, Retraction
from ..records.verdict import CacheMiss, MissKind, Reason, Verdict
from .request_story import Act, Beginning, Decision, Episode, Forgotten, RequestStory

COLUMNS: Final = ("after", "passes", "what", "why", "need", "have")
MAX_ROWS: Final = 200
"""The middle of longer stories is left out."""
_KEPT_RIDS: Final = 200
_KEY_CHARS: Final = 4
"""Shown of the digest of a session's key."""
_CAUSES: Final = {
    "memory": "KV memory ran out",
    "priority": "a more urgent request took its place",
    "background": "it is a batch request, and an interactive one took its place",
    "device memory": "the device had no memory for its step",
    "chaos": "a fault that --chaos asked for",
}


def explain(
    records: Iterable[DecisionRecord],
    rid: str,
    *,
    names: Sequence[str] | None = None,
    beginning: Beginning | None = None,
    advice: str = "",
    for_clients: bool = False,
) -> Explanation:
    """Explain the history of request `rid`.

    Clients know a generation by one id; its choices are separate requests, `rid-0`, `rid-1`, ... If there is no request
    `rid`, its first choice is explained.

    Args:
        records: oldest first; read once.
        rid: see above.
        names: rids that may be meant, if already known; at most one if there is a `beginning`.
        beginning: facts about an unfinished request, in case the log has dropped its arrival.
        advice: added to the answer if nothing is known of the request.
        for_clients: omit the contents of other namespaces of the prefix cache (see `CacheMiss.for_clients`), and the
            ids of other requests, which a client could use to abort them.
    """
    stories = [RequestStory(name) for name in (names if names is not None else (rid, f"{rid}-0"))]
    choices: dict[str, None] = {}
    others: dict[str, None] = {}  # the newest ids
    num_records, first_s, last_s = 0, 0.0, 0.0
    for record in records:
        if not num_records:
            first_s = record.now_s
            if beginning is not None and beginning.arrived.now_s < first_s:
                stories[0].begin(beginning, first_s)
        num_records += 1
        for story in stories:
            story.take(record)
            if len(stories) > 1 and story.is_known:
                stories = [story]  # only one of the names exists
        if type(record) is Arrived:
            if record.rid.startswith(f"{rid}-"):
                choices[record.rid] = None
            others[record.rid] = None
            if len(others) > _KEPT_RIDS:
                del others[next(iter(others))]
    if num_records:
        last_s = record.now_s
    if not stories or not stories[0].is_known:
        words = _unknown(rid, list(others), num_records, last_s - first_s, hint=not for_clients)
        return Explanation(False, f"{words}{advice}.")
    story = stories[0]
    if for_clients:
        for episode in story.episodes:
            if isinstance(episode.cause, CacheMiss):
                episode.cause = episode.cause.for_clients()
            elif isinstance(episode.cause, Decision) and episode.cause.behind:
                episode.cause = episode.cause._replace(behind="another request")
    sentence = _sentence(story, last_s)
    if story.rid != rid and len(choices) > 1:
        sentence += f" It is one of {len(choices)} choices; ask for {', '.join(list(choices)[1:4])} as well."
    return Explanation(True, sentence, COLUMNS, tuple(_rows(story)))


def _unknown(rid: str, others: list[str], num_records: int, span_s: float, *, hint: bool) -> str:
    near = (difflib.get_close_matches(rid, others, n=1) or others[-1:]) if hint else []
    such_as = f", such as {near[0]}" if near else ""
    count = (
        f"{len(others)}{'+' if len(others) == _KEPT_RIDS else ''} request{'' if len(others) == 1 else 's'}"
    )
    decisions = f"{counted(num_records, 'decision', commas=True)} of {span_s:,.1f} s"
    return f"Nothing is known of {rid}: remembered are {decisions}, about {count}{such_as}"


# ---------------------------------------------------------------- the sentence


def _sentence(story: RequestStory, now_s: float) -> str:
    parts = [
        _waiting_words(story, now_s),
        *_grammar_words(story),
        *_prompt_words(story),
        *_image_words(story),
        *_disk_words(story),
        *_cache_words(story),
        *_retraction_words(story),
        *_end_words(story, now_s),
    ]
    words = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"
    return f"{story.rid} {words}{_gap_words(story)}."


def _gap_words(story: RequestStory) -> str:
    if story.arrived is None:
        return " (what came before is no longer remembered)"
    for each in story.episodes[:2]:
        if isinstance(each.cause, Forgotten):
            return (
                f" (the decisions of its first {each.last_s - each.first_s:,.3f} s are no longer remembered)"
            )
    return ""


def _waiting_words(story: RequestStory, now_s: float) -> str:
    still = story.waiting_since_s is not None
    waited_s = story.waited_s + (now_s - story.waiting_since_s if story.waiting_since_s is not None else 0.0)
    waits = [(each, each.cause) for each in story.episodes if isinstance(each.cause, Decision)]
    waits = [(each, cause) for each, cause in waits if cause.act is Act.WAITED]
    by_reason: Counter[Reason] = Counter()
    for each, cause in waits:
        by_reason[cause.reason] += each.num_passes
    if not by_reason:
        return _no_pass_words(story, waited_s)
    num_passes = by_reason.total()
    reason, count = by_reason.most_common(1)[0]
    last = next(each for each, cause in reversed(waits) if cause.reason is reason)
    share = "" if len(by_reason) == 1 else f"in {count:,} of them "
    verb = "has waited" if still else "waited"
    passes = counted(num_passes, "pass", "passes", commas=True)
    return f"{verb} {waited_s:.3f} s in {passes}, {share}because {_why(last)}{_arithmetic(last.verdict)}"


def _no_pass_words(story: RequestStory, waited_s: float) -> str:
    if story.waiting_since_s is not None:
        return f"has waited {waited_s:.3f} s, and no pass has come to it yet"
    if story.arrived is None:
        return "was running"
    if not story.was_started:
        return f"waited {waited_s:.3f} s without a pass that looked at it"
    if story.forgotten is not None and story.forgotten.started_s is not None:
        return f"was started {waited_s:.3f} s after it came"
    return "was started in the first pass after it came"


def _arithmetic(verdict: Verdict | None) -> str:
    if verdict is None or not (verdict.need or verdict.have):
        return ""
    return f" (need {verdict.need:,}, have {verdict.have:,})"


def _grammar_words(story: RequestStory) -> Iterator[str]:
    if story.grammar_s is not None:
        yield f"had its grammar after {story.grammar_s:.3f} s"


def _prompt_words(story: RequestStory) -> Iterator[str]:
    num_chunks = num_tokens = 0
    cuts: dict[Reason, None] = {}
    for each in story.episodes:
        if isinstance(each.cause, Decision) and each.cause.act in (Act.STARTED, Act.COMPUTED):
            num_chunks += each.num_passes
            num_tokens += each.num_tokens
            if each.cause.reason.is_cut:
                cuts[each.cause.reason] = None
    if num_chunks > 1 + story.num_retractions:
        reasons = "; ".join(reason.text for reason in cuts) or Reason.CHUNKED.text
        tokens = counted(num_tokens, "token", commas=True)
        yield f"computed its prompt in {counted(num_chunks, 'chunk')}, {tokens} ({reasons})"


def _image_words(story: RequestStory) -> Iterator[str]:
    if story.arrived is None or not story.arrived.num_images or not story.was_started:
        return
    count = story.arrived.num_images
    images = "image" if count == 1 else f"{count} images"
    if story.num_tiles:
        yield f"had {counted(story.num_tiles, 'tile')} of its {images} encoded"
    else:
        yield f"found its {images} encoded"


def _disk_words(story: RequestStory) -> Iterator[str]:
    for each in story.episodes:
        if isinstance(each.cause, Handover) and each.cause.event == "loaded":
            yield f"loaded {each.cause.detail}"
        elif isinstance(each.cause, Handover) and each.cause.event == "not loaded":
            yield f"loaded nothing from disk, because {each.cause.detail}"


def _cache_words(story: RequestStory) -> Iterator[str]:
    misses = [each.cause for each in story.episodes if isinstance(each.cause, CacheMiss)]
    if misses:
        turn = "" if story.arrived is None else _turn_words(story.arrived)
        yield f"found{turn and f', as {turn},'} {_miss_words(misses[0])}"


def _turn_words(arrived: Arrived) -> str:
    return f"turn {arrived.turn:,} of session {arrived.session[:_KEY_CHARS]}" if arrived.turn else ""


def _miss_words(miss: CacheMiss) -> str:
    where = ""
    if miss.kind is MissKind.DIFFERS:
        where = f", token {miss.differs_at:,}"
    elif miss.kind in (MissKind.EVICTED, MissKind.FLUSHED):
        if miss.lost_s or miss.idle_s:
            where = f", {miss.lost_s:,.3f} s ago and {miss.idle_s:,.3f} s after its last use"
        where += f", eviction no. {miss.evicted_at:,}" if miss.evicted_at else ""
    on_host = f", and {miss.host_tokens:,} in host memory" if miss.host_tokens else ""
    tokens = f"{miss.prefix_len:,} of {miss.prompt_len:,} prompt tokens"
    return f"{tokens} in the cache ({miss.kind.text}{where}){on_host}"


def _retraction_words(story: RequestStory) -> Iterator[str]:
    if not story.num_retractions:
        return
    causes = Counter(each.cause.cause for each in story.episodes if isinstance(each.cause, Retraction))
    words = ", ".join(f"{count}x because {_CAUSES.get(cause, cause)}" for cause, count in causes.items())
    yield f"was retracted {words}"


def _end_words(story: RequestStory, now_s: float) -> Iterator[str]:
    left = story.left
    if left is None:
        if (
            story.forgotten is not None
            and story.forgotten.started_s is not None
            and story.waiting_since_s is None
        ):
            yield f"still runs, {now_s - story.forgotten.started_s:,.3f} s after its start"
        return
    if story.arrived is not None and not story.was_started:
        yield "was never started"
    after_s = story.episodes[-1].last_s - story.episodes[0].first_s
    message = f": {left.message}" if left.message else ""
    kind = f"{left.kind}{_by_grammar(story)}{message}{_draft_words(left)}{_overruled_words(left)}"
    yield f"ended after {after_s:.3f} s with {counted(left.output_len, 'token', commas=True)} ({kind})"


def _by_grammar(story: RequestStory | None) -> str:
    return ", ended by its grammar" if story is not None and story.ended_by_grammar else ""


def _draft_words(left: Finished) -> str:
    if not left.num_drafts:
        return ""
    per_step = left.output_len / max(1, left.output_len - left.num_accepted_drafts)
    share = left.num_accepted_drafts / left.num_drafts
    methods = f" ({', '.join(left.draft_methods)})" if left.draft_methods else ""
    return f"; {per_step:.1f} tokens a step; {share:.0%} of {left.num_drafts:,} drafts right{methods}"


def _overruled_words(left: Finished) -> str:
    if not left.num_overruled:
        return ""
    return f"; its grammar overruled {left.num_overruled:,} of its tokens"


# ---------------------------------------------------------------- the table


def _rows(story: RequestStory) -> Iterator[tuple[str, ...]]:
    start_s = story.episodes[0].first_s
    num_left_out = len(story.episodes) - MAX_ROWS
    for idx, episode in enumerate(story.episodes):
        if num_left_out <= 0 or idx < MAX_ROWS // 2 or idx >= MAX_ROWS // 2 + num_left_out:
            yield _row(episode, start_s, story)
        elif idx == MAX_ROWS // 2:
            yield ("…", "", "", f"{num_left_out:,} more lines", "", "")


def _row(episode: Episode, start_s: float, story: RequestStory) -> tuple[str, ...]:
    after = f"{episode.first_s - start_s:.3f} s"
    if episode.num_passes > 1 or isinstance(episode.cause, Forgotten):
        after = f"{episode.first_s - start_s:.3f} - {episode.last_s - start_s:.3f} s"
    need = have = ""
    verdict = episode.verdict
    if verdict is not None and (verdict.need or verdict.have):
        need, have = f"{verdict.need:,}", f"{verdict.have:,}"
    return (after, _passes(episode), _what(episode), _why(episode, story), need, have)


def _passes(episode: Episode) -> str:
    if not episode.first_step:
        return str(episode.num_passes or "")
    if episode.num_passes <= 1:
        return f"step {episode.first_step}"
    return f"{episode.num_passes:,}, steps {episode.first_step}-{episode.last_step}"


def _what(episode: Episode) -> str:
    match episode.cause:
        case Arrived():
            return "came"
        case Forgotten():
            return "forgotten"
        case Decision():
            return str(episode.cause.act)
        case CacheMiss():
            return "cache"
        case Retraction():
            return "swapped out" if episode.cause.mode == "swap" else "retracted"
        case Finished():
            return "ended"
        case Handover():
            return episode.cause.event


def _why(episode: Episode, story: RequestStory | None = None) -> str:
    cause = episode.cause
    match cause:
        case Arrived():
            return _arrival_words(cause)
        case Forgotten():
            return _forgotten_words(cause, episode)
        case Decision():
            return _decision_words(cause, episode)
        case CacheMiss():
            return _miss_words(cause)
        case Retraction():
            return _loss_words(cause, story)
        case Finished():
            message = f": {cause.message}" if cause.message else ""
            by_grammar = _by_grammar(story)
            tokens = counted(cause.output_len, "token", commas=True)
            return (
                f"{cause.kind}, {tokens}{by_grammar}{message}{_draft_words(cause)}{_overruled_words(cause)}"
            )
        case Handover():
            return cause.detail


def _arrival_words(arrived: Arrived) -> str:
    most = counted(arrived.max_new_tokens, "new one", commas=True)
    words = f"prompt of {counted(arrived.prompt_len, 'token', commas=True)}, at most {most}"
    if arrived.num_images:
        words += f", {counted(arrived.num_images, 'image')}"
    if arrived.num_delivered:
        words += f", {arrived.num_delivered:,} of them delivered before a process was lost"
    if arrived.awaits_kv:
        words += ", prompt computed by another engine"
    if turn := _turn_words(arrived):
        words += f", {turn}"
    if arrived.background:
        words += ", of the batch class"
    if arrived.priority:
        words += f", priority {arrived.priority}"
    # Not the tenant: it may be an API key.
    return f"{words}, sibling in {arrived.group}" if arrived.group else words


def _forgotten_words(forgotten: Forgotten, episode: Episode) -> str:
    words = "decisions of this time are no longer remembered"
    if forgotten.started_s is None:
        return f"{words}; it waited all the time"
    return f"{words}; it was started at {forgotten.started_s - episode.first_s:.3f} s"


def _decision_words(decision: Decision, episode: Episode) -> str:
    words = decision.reason.text
    if decision.behind:
        words += f" ({decision.behind})"
    if decision.act in (Act.STARTED, Act.COMPUTED) and episode.verdict is not None:
        cached = f"{episode.verdict.prefix_len:,} cached, " if decision.act is Act.STARTED else ""
        words += f": {cached}{episode.num_tokens:,} computed"
    return words


def _loss_words(retraction: Retraction, story: RequestStory | None) -> str:
    generated = counted(retraction.output_len, "generated token", commas=True)
    words = f"{_CAUSES.get(retraction.cause, retraction.cause)}; after {generated}"
    if retraction.mode == "swap":
        return f"{words} its {counted(retraction.num_pages, 'page', commas=True)} went to the host"
    if story is None or story.arrived is None:
        return f"{words} its {counted(retraction.num_pages, 'page', commas=True)} went, to be computed again"
    num_tokens = story.arrived.prompt_len + retraction.output_len
    return f"{words} its {num_tokens:,} tokens must be computed again, except those that are still cached"
