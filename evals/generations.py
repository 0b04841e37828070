"""One text by a model under every schema, with drafts and without: whether those that end are valid, and whether drafts
changed any. Knows files of schemas only as cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from specdec.errors import DeadEnd, InvalidRequest
from specdec.evals.cases import Case
from specdec.evals.second_opinion import SecondOpinion
from specdec.evals.structured import validator
from specdec.grammar.spec import Formats, JsonSchema, Whitespace
from specdec.grammar.validated import problem
from specdec.llm import LLM
from specdec.metrics import Acceptance
from specdec.request import Request, Sampling, Stopping

MAX_SHOWN = 400  # characters of a schema in the prompt
ENDS = ("valid", "unfinished", "invalid", "dead_end", "failed")

_ids = count()


@dataclass(frozen=True, slots=True)
class Asked:
    """A case whose schema compiles, with the request for it."""

    case: Case
    request: Request


@dataclass(frozen=True, slots=True)
class Text:
    """What came of a request: its tokens, what they spell, and how it ended."""

    tokens: tuple[int, ...]
    data: bytes
    end: str
    reason: str
    acceptance: Acceptance = field(repr=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """How to generate: `batch` texts at once, each with the same `seed` and of up to `max_tokens` tokens."""

    temperature: float = 1.0
    seed: int = 0
    max_tokens: int = 256
    batch: int = 16
    formats: Formats = "assert"
    whitespace: Whitespace = "flexible"


def measure(
    llm: LLM,
    cases: Sequence[Case],
    settings: Settings,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The report: for texts `plain` and `drafted` how many ended how, `equal_texts`, and the `failing` by their ids.

    `finished` = valid + invalid; `failed` are requests that ended with an error other than a dead end.
    """
    refused: list[dict[str, str]] = []
    asked = list(_asked(llm, cases, settings, refused))
    judge = SecondOpinion.find({}, assert_formats=settings.formats == "assert")
    kinds: dict[str, list[Text]] = {"plain": [], "drafted": []}
    for first in range(0, len(asked), settings.batch):
        batch = asked[first : first + settings.batch]
        for number, (kind, texts) in enumerate(kinds.items()):
            texts += _run(llm, batch, settings, judge, speculative=kind == "drafted")
            progress(2 * first + (number + 1) * len(batch), 2 * len(asked))
    plain, drafted = kinds.values()
    failing = [
        {"id": one.case.id, "kind": kind, "end": text.end, "reason": text.reason}
        for kind, texts in kinds.items()
        for one, text in zip(asked, texts, strict=True)
        if text.end not in ("valid", "unfinished")
    ]
    different = [
        one.case.id for one, text, other in zip(asked, plain, drafted, strict=True) if text.tokens != other.tokens
    ]
    return {
        "schemas": len(cases),
        "compiled": len(asked),
        **{kind: _counts(texts) for kind, texts in kinds.items()},
        "equal_texts": len(asked) - len(different),
        "different": different,
        "failing": failing,
        "refused": refused,
        "second_opinion": None if judge is None else judge.name,
    }


def _asked(llm: LLM, cases: Sequence[Case], settings: Settings, refused: list[dict[str, str]]) -> Iterator[Asked]:
    sampling = Sampling(temperature=settings.temperature, seed=settings.seed)
    stopping = Stopping(max_tokens=settings.max_tokens)
    for case in cases:
        shown = case.schema if len(case.schema) <= MAX_SHOWN else case.schema[:MAX_SHOWN] + "..."
        prompt = llm.loaded.tokenizer.encode(f"A JSON schema:\n{shown}\n\nA value that it allows:\n")
        try:
            spec = JsonSchema(case.schema, settings.whitespace, settings.formats)
            yield Asked(case, llm.request(prompt, sampling, stopping, constraint=spec))
        except InvalidRequest as error:
            refused.append({"id": case.id, "reason": f"{error.code}: {error.message}"})


def _run(
    llm: LLM, batch: Sequence[Asked], settings: Settings, second: SecondOpinion | None, *, speculative: bool
) -> list[Text]:
    """All texts of a batch, drawn at once. No drafter may find in its memory what another run wrote."""
    engine, salt = llm.loaded.engine, f"generations-{next(_ids)}"
    sequences = []
    for number, one in enumerate(batch):
        sampling = replace(one.request.sampling, speculative=speculative)
        request = replace(one.request, sampling=sampling, cache_salt=salt)
        sequences += engine.add(request, f"{salt}-{number}")
    try:
        while engine.has_work:
            engine.step()
    finally:
        for number in range(len(batch)):
            engine.abort(f"{salt}-{number}")
    texts = []
    for one, seq in zip(batch, sequences, strict=True):
        tokens = tuple(seq.tokens[seq.num_prompt :])
        written = tokens[:-1] if seq.finish_reason == "stop" else tokens
        data = b"".join(map(llm.loaded.tokenizer.token_bytes, written))
        end, reason = judged(one.case, data, seq.finish_reason, seq.error, settings, second)
        texts.append(Text(tokens, data, end, reason, seq.acceptance))
    return texts


def judged(
    case: Case,
    data: bytes,
    finish_reason: str | None,
    error: Exception | None,
    settings: Settings,
    second: SecondOpinion | None,
) -> tuple[str, str]:
    """How a text ended, and why so."""
    if isinstance(error, DeadEnd):
        return "dead_end", str(error)
    if error is not None:
        return "failed", str(error)
    if finish_reason != "stop":
        return "unfinished", ""
    wrong = problem(data, validator(case.schema, {}, settings.formats))
    if wrong is None and second is not None:
        wrong, _ = second.problem(case.schema, data.decode())
    return ("valid", "") if wrong is None else ("invalid", f"{data[:200]!r}: {wrong}")


def _counts(texts: Sequence[Text]) -> Mapping[str, int]:
    ends = Counter(text.end for text in texts)
    total = Acceptance.total(text.acceptance for text in texts)
    return {
        "finished": ends["valid"] + ends["invalid"],
        **{end: ends[end] for end in ENDS},
        "tokens": sum(len(text.tokens) for text in texts),
        "draft_tokens": total.draft_tokens,
        "accepted_tokens": total.accepted_tokens,
    }
