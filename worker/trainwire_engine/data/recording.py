"""Keeps how a template renders one structure of conversation, and renders others of it without the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainwire_engine.data.recorder import SIGN, Pick, Recorder, Step, Untraceable, apply, sign_text, value_of
from trainwire_engine.data.signs import Source, split, with_contents
from trainwire_engine.data.stand_in import StandIn
from trainwire_engine.data.traced_template import TracedTemplate
from trainwire_engine.data.turns import Contents, Place, Signed, TurnFinder, TurnNotFound, choose_blocks
from trainwire_engine.template import CLOSE, MARKS, OPEN, Message, Span, TemplateFailed, tracking


@dataclass
class Recording:
    """The text around the contents, the places of the turns, and the questions that have to be answered alike."""

    signed: Signed
    places: list[tuple[Place, Place]]
    steps: list[tuple[int | str, str, tuple[Any, ...], Any]]
    uses: int = 0

    def replay(self, contents: Sequence[str]) -> tuple[str, list[Span]] | None:
        """The text and its spans for other contents; None if one of them gives another answer."""
        values = list(contents)
        for source, name, args, answer in self.steps:
            try:
                result = apply(values[source] if type(source) is int else value_of(str(source), values), name, args)
            except (TypeError, ValueError, LookupError):
                return None
            if type(answer) is Pick:
                values.append(result if answer.entry is None else result[answer.entry])
            elif (len(result) if isinstance(result, list | tuple) else result) != answer:
                return None
        pieces: list[str] = []
        starts: list[int] = []
        at = 0
        signs = iter(self.signed.signs)
        for literal in self.signed.literals:
            starts.append(at)
            sign = next(signs, None)
            content = "" if sign is None else values[sign]
            pieces += (literal, content)
            at += len(literal) + len(content)
        spans = [(starts[begin.literal] + begin.offset, starts[end.literal] + end.offset) for begin, end in self.places]
        return "".join(pieces), spans


def record(
    template: TracedTemplate,
    finder: TurnFinder,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    turns: Sequence[int],
    sources: Sequence[Source],
) -> Recording | None:
    """Render a conversation with stand-ins and find its turns; None where the template cannot be followed."""
    recorder = Recorder([s.text for s in sources], [s.message for s in sources], [s.kind for s in sources])
    numbers = iter(range(len(sources)))
    stand_ins = [
        with_contents(index, message, lambda *_: StandIn(sign_text(next(numbers)), recorder))
        for index, message in enumerate(messages)
    ]

    def render(count: int, prompt: bool) -> Signed:
        try:
            return split(template.render(stand_ins[:count], tools, prompt))
        except Untraceable:
            raise
        except Exception as error:
            raise TemplateFailed(str(error), None) from None

    try:
        with tracking():
            whole, blocks = _without_brackets(render(len(messages), False))
        contents = Contents(recorder.owners, recorder.kinds, recorder.roots, recorder.origins)
        if blocks:
            places = choose_blocks(blocks, messages, turns)
        else:
            found = finder.find(whole, render, len(messages), turns, contents)
            places = [found[turn] for turn in sorted(found)]
    except (Untraceable, TurnNotFound, TemplateFailed):
        return None
    return Recording(whole, places, [_numbered(step) for step in recorder.steps])


def _numbered(step: Step) -> tuple[int | str, str, tuple[Any, ...], Any]:
    text, name, args, answer = step
    single = SIGN.fullmatch(text)
    return (int(single[1]) if single else text, name, args, answer)


def _without_brackets(signed: Signed) -> tuple[Signed, list[tuple[Place, Place]]]:
    """Take the brackets of generation blocks out of the literals, and say where they were."""
    literals: list[str] = []
    blocks: list[tuple[Place, Place]] = []
    opened, depth = Place(0, 0), 0
    for index, literal in enumerate(signed.literals):
        kept = ""
        for piece in MARKS.split(literal):
            if piece == OPEN:
                opened = opened if depth else Place(index, len(kept))
                depth += 1
            elif piece == CLOSE:
                depth -= 1
                if not depth:
                    blocks.append((opened, Place(index, len(kept))))
            else:
                kept += piece
        literals.append(kept)
    return Signed(literals, signed.signs), blocks
