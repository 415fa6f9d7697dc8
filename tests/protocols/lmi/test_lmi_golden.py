"""Golden bytes of every LMI and TGI form, each with its source, and an oracle of dicts and Python's json that agrees.

"seed" is LMI's published inference schema (v0.31), followed where its examples are right; "decision" is what
docs/reference/standards.md says where they are not; "0.31" is what LMI's own formatters write; "TGI" is
text-generation-inference.
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.messages import TopToken
from protocols.lmi import Formatter, Parameters, TextEncoder, TextRequest
from protocols.lmi.errors import LMIError, error_body, generation_error_body, tgi_error_body
from tests.protocols.lmi.lmi_json import dumped

JSON, JSONLINES, SSE = Formatter.JSON, Formatter.JSONLINES, Formatter.SSE


class Step(NamedTuple):
    """One call of `TextEncoder.token`."""

    id: int
    text: str
    log_prob: float | None
    special: bool = False
    finish: str | None = None
    top: tuple[TopToken, ...] = ()
    sequence: int = 0


# --- the generation that all golden answers are of


PROMPT = "Deep Learning"
PREFILL: list[tuple[int, str, float | None]] = [(1, "Deep", None), (2, " Learning", -0.25)]
TOP_IS = (TopToken(id=278, text=" is", log_prob=-0.007458459585905075), TopToken(id=310, text=" of", log_prob=-4.5))
TOP_EOS = (TopToken(id=9, text="", log_prob=-0.5, special=True),)
STEPS = [
    Step(278, " is", -0.007458459585905075, top=TOP_IS),  # the id and the log_prob are those of the seed's third token
    Step(5972, " field.", -0.6950479745864868),  # the seed's last
    Step(9, "", -0.5, special=True, finish="eos_token", top=TOP_EOS),
]
OTHERS = [Step(310, " of", -4.5, sequence=1), Step(12, ' "it"', -1.0, finish="stop_sequence", sequence=1)]

IS = '{"id": 278, "text": " is", "log_prob": -0.007458459585905075}'
FIELD = '{"id": 5972, "text": " field.", "log_prob": -0.6950479745864868}'
EOS = '{"id": 9, "text": "", "log_prob": -0.5, "special_token": true}'
OF = '{"id": 310, "text": " of", "log_prob": -4.5}'
IT = r'{"id": 12, "text": " \"it\"", "log_prob": -1.0}'
ASKED = '[{"id": 1, "text": "Deep", "log_prob": null}, {"id": 2, "text": " Learning", "log_prob": -0.25}]'

TGI_IS = '{"id": 278, "text": " is", "logprob": -0.007458459585905075, "special": false}'
TGI_FIELD = '{"id": 5972, "text": " field.", "logprob": -0.6950479745864868, "special": false}'
TGI_EOS = '{"id": 9, "text": "", "logprob": -0.5, "special": true}'
TGI_OF = '{"id": 310, "text": " of", "logprob": -4.5, "special": false}'
TGI_IT = r'{"id": 12, "text": " \"it\"", "logprob": -1.0, "special": false}'
TGI_ASKED = '[{"id": 1, "text": "Deep", "logprob": null}, {"id": 2, "text": " Learning", "logprob": -0.25}]'


class Golden(NamedTuple):
    """An answer and who says that it is so."""

    source: str
    formatter: Formatter
    asked: dict[str, Any]
    lines: list[str]
    """Without their frames; of json the document."""
    tgi: bool = False
    steps: list[Step] = STEPS


LMI = {
    "json": Golden(
        "seed, Response Schema: details only if asked for",
        JSON,
        {},
        ['{"generated_text": " is field."}'],
    ),
    "json-details": Golden(
        "seed, Response Schema, where `finish reason` is decided to be the finish_reason of its table",
        JSON,
        {"details": True},
        [
            '{"generated_text": " is field.", "details": {"finish_reason": "eos_token", "generated_tokens": 3, '
            f'"inputs": "Deep Learning", "tokens": [{IS}, {FIELD}, {EOS}]}}}}'
        ],
    ),
    "json-prefill": Golden(
        "seed, Details: prefill, an array of prompt tokens; 0.31: after the tokens, null for the first",
        JSON,
        {"details": True, "decoder_input_details": True},
        [
            '{"generated_text": " is field.", "details": {"finish_reason": "eos_token", "generated_tokens": 3, '
            f'"inputs": "Deep Learning", "tokens": [{IS}, {FIELD}, {EOS}], "prefill": {ASKED}}}}}'
        ],
    ),
    "json-prefill-without-details": Golden(
        "0.31: prefill only with details and decoder_input_details",
        JSON,
        {"decoder_input_details": True, "top_n_tokens": 2},
        ['{"generated_text": " is field."}'],
    ),
    "json-top-tokens": Golden(
        "0.31: top_tokens, a list of tokens for each step, with details and top_n_tokens; a step without has none",
        JSON,
        {"details": True, "top_n_tokens": 2},
        [
            '{"generated_text": " is field.", "details": {"finish_reason": "eos_token", "generated_tokens": 3, '
            f'"inputs": "Deep Learning", "tokens": [{IS}, {FIELD}, {EOS}], "top_tokens": [[{IS}, {OF}], [], [{EOS}]]}}}}'
        ],
    ),
    "json-full-text": Golden(
        "0.31: prompt and text with nothing between; the tokens' texts are as they were",
        JSON,
        {"return_full_text": True, "details": True},
        [
            '{"generated_text": "Deep Learning is field.", "details": {"finish_reason": "eos_token", '
            f'"generated_tokens": 3, "inputs": "Deep Learning", "tokens": [{IS}, {FIELD}, {EOS}]}}}}'
        ],
    ),
    "json-best-of": Golden(
        "seed, BestOfSequence; 0.31: details always, `inputs` first, generated_text last in the others",
        JSON,
        {"best_of": 2},
        [
            '{"generated_text": " is field.", "details": {"inputs": "Deep Learning", "finish_reason": "eos_token", '
            f'"generated_tokens": 3, "tokens": [{IS}, {FIELD}, {EOS}], "best_of_sequences": [{{"finish_reason": '
            f'"stop_sequence", "generated_tokens": 2, "tokens": [{OF}, {IT}], "generated_text": " of \\"it\\""}}]}}}}'
        ],
        steps=[OTHERS[0], STEPS[0], OTHERS[1], *STEPS[1:]],
    ),
    "json-best-of-everything": Golden(
        "0.31, get_sequence_details: prefill and top_tokens, if asked for, in each sequence, whatever details says",
        JSON,
        {"num_beams": 2, "details": False, "decoder_input_details": True, "top_n_tokens": 2, "return_full_text": True},
        [
            '{"generated_text": "Deep Learning is field.", "details": {"inputs": "Deep Learning", "finish_reason": '
            f'"eos_token", "generated_tokens": 3, "tokens": [{IS}, {FIELD}, {EOS}], "prefill": {ASKED}, "top_tokens": '
            f'[[{IS}, {OF}], [], [{EOS}]], "best_of_sequences": [{{"finish_reason": "stop_sequence", "generated_tokens": '
            f'2, "tokens": [{OF}, {IT}], "prefill": {ASKED}, "top_tokens": [[], []], '
            '"generated_text": "Deep Learning of \\"it\\""}]}}'
        ],
        steps=[*OTHERS, *STEPS],
    ),
    "json-best-of-alone": Golden(
        "0.31: best_of_sequences is absent where there is no other sequence",
        JSON,
        {"n": 2},
        [
            '{"generated_text": " is field.", "details": {"inputs": "Deep Learning", "finish_reason": "eos_token", '
            f'"generated_tokens": 3, "tokens": [{IS}, {FIELD}, {EOS}]}}}}'
        ],
    ),
    "lines": Golden(
        "seed, the streaming example, on one line each; decision: details on the last line only if asked for",
        JSONLINES,
        {},
        [f'{{"token": {IS}}}', f'{{"token": {FIELD}}}', f'{{"token": {EOS}, "generated_text": " is field."}}'],
    ),
    "lines-details": Golden(
        "seed, the streaming example's last line",
        JSONLINES,
        {"details": True, "return_full_text": True},
        [
            f'{{"token": {IS}}}',
            f'{{"token": {FIELD}}}',
            f'{{"token": {EOS}, "generated_text": "Deep Learning is field.", "details": '
            '{"finish_reason": "eos_token", "generated_tokens": 3, "inputs": "Deep Learning"}}',
        ],
    ),
    "lines-everything": Golden(
        "0.31, get_details_dict: a stream's details are those of json without tokens",
        JSONLINES,
        {"details": True, "decoder_input_details": True, "top_n_tokens": 2},
        [
            f'{{"token": {IS}}}',
            f'{{"token": {FIELD}}}',
            f'{{"token": {EOS}, "generated_text": " is field.", "details": {{"finish_reason": "eos_token", '
            f'"generated_tokens": 3, "inputs": "Deep Learning", "prefill": {ASKED}, '
            f'"top_tokens": [[{IS}, {OF}], [], [{EOS}]]}}}}',
        ],
    ),
    "lines-of-the-best": Golden(
        "0.31: only the best sequence is streamed",
        JSONLINES,
        {"n": 2},
        [f'{{"token": {IS}}}', f'{{"token": {FIELD}}}', f'{{"token": {EOS}, "generated_text": " is field."}}'],
        steps=[*OTHERS, *STEPS],
    ),
    "lines-end-unknown": Golden(
        "decision: a last line of its own, with an empty special token that is not counted",
        JSONLINES,
        {"details": True},
        [
            f'{{"token": {IS}}}',
            '{"token": {"id": 0, "text": "", "log_prob": 0.0, "special_token": true}, "generated_text": " is", "details": '
            '{"finish_reason": "eos_token", "generated_tokens": 1, "inputs": "Deep Learning"}}',
        ],
        steps=STEPS[:1],
    ),
}
TGI = {
    "tgi-json": Golden(
        "seed, TGI compatibility: an array of one; decision: special, seed and prefill always, as TGI's clients declare",
        JSON,
        {"details": True},
        [
            '[{"generated_text": " is field.", "details": {"finish_reason": "eos_token", "generated_tokens": 3, "seed": null, '
            f'"inputs": "Deep Learning", "tokens": [{TGI_IS}, {TGI_FIELD}, {TGI_EOS}], "prefill": []}}}}]'
        ],
        tgi=True,
    ),
    "tgi-json-without-details": Golden(
        "0.31 and TGI: details false wins, and there is no key",
        JSON,
        {"details": False, "return_full_text": True},
        ['[{"generated_text": "Deep Learning is field."}]'],
        tgi=True,
    ),
    "tgi-json-everything": Golden(
        "TGI, Details: seed, prefill (whose tokens have no `special`), top_tokens",
        JSON,
        {"details": True, "seed": 42, "decoder_input_details": True, "top_n_tokens": 2},
        [
            '[{"generated_text": " is field.", "details": {"finish_reason": "eos_token", "generated_tokens": 3, "seed": 42, '
            f'"inputs": "Deep Learning", "tokens": [{TGI_IS}, {TGI_FIELD}, {TGI_EOS}], "prefill": {TGI_ASKED}, '
            f'"top_tokens": [[{TGI_IS}, {TGI_OF}], [], [{TGI_EOS}]]}}}}]'
        ],
        tgi=True,
    ),
    "tgi-json-best-of": Golden(
        "TGI, BestOfSequence: seed and prefill of each; 0.31: `inputs` first",
        JSON,
        {"details": True, "best_of": 2},
        [
            '[{"generated_text": " is field.", "details": {"inputs": "Deep Learning", "finish_reason": "eos_token", '
            f'"generated_tokens": 3, "seed": null, "tokens": [{TGI_IS}, {TGI_FIELD}, {TGI_EOS}], "prefill": [], '
            '"best_of_sequences": [{"finish_reason": "stop_sequence", "generated_tokens": 2, "seed": null, '
            f'"tokens": [{TGI_OF}, {TGI_IT}], "prefill": [], "generated_text": " of \\"it\\""}}]}}}}]'
        ],
        tgi=True,
        steps=[*STEPS, *OTHERS],
    ),
    "tgi-events": Golden(
        "TGI, StreamResponse: index from 1, nulls before the end; decision: `data: `, LMI's inputs in TGI's StreamDetails",
        SSE,
        {"details": True, "seed": -1},
        [
            f'{{"index": 1, "token": {TGI_IS}, "generated_text": null, "details": null}}',
            f'{{"index": 2, "token": {TGI_FIELD}, "generated_text": null, "details": null}}',
            f'{{"index": 3, "token": {TGI_EOS}, "generated_text": " is field.", "details": {{"finish_reason": "eos_token", '
            '"generated_tokens": 3, "seed": -1, "input_length": 2, "inputs": "Deep Learning"}}',
        ],
        tgi=True,
    ),
    "tgi-events-without-details": Golden(
        "TGI, StreamResponse: details null on the last event too",
        SSE,
        {"details": False},
        [
            f'{{"index": 1, "token": {TGI_IS}, "generated_text": null, "details": null}}',
            f'{{"index": 2, "token": {TGI_FIELD}, "generated_text": null, "details": null}}',
            f'{{"index": 3, "token": {TGI_EOS}, "generated_text": " is field.", "details": null}}',
        ],
        tgi=True,
    ),
    "tgi-events-top-tokens": Golden(
        "TGI's tests: top_tokens on each event, omitted when empty; 0.31: in the last details, if there are any, too",
        SSE,
        {"details": True, "top_n_tokens": 2},
        [
            f'{{"index": 1, "token": {TGI_IS}, "top_tokens": [{TGI_IS}, {TGI_OF}], "generated_text": null, "details": null}}',
            f'{{"index": 2, "token": {TGI_FIELD}, "generated_text": null, "details": null}}',
            f'{{"index": 3, "token": {TGI_EOS}, "top_tokens": [{TGI_EOS}], "generated_text": " is field.", "details": '
            '{"finish_reason": "eos_token", "generated_tokens": 3, "seed": null, "input_length": 2, "inputs": '
            f'"Deep Learning", "top_tokens": [[{TGI_IS}, {TGI_OF}], [], [{TGI_EOS}]]}}}}',
        ],
        tgi=True,
    ),
    "tgi-events-end-unknown": Golden(
        "decision: an event of its own with the next index, and an empty special token that is not counted",
        SSE,
        {"details": True},
        [
            f'{{"index": 1, "token": {TGI_IS}, "generated_text": null, "details": null}}',
            '{"index": 2, "token": {"id": 0, "text": "", "logprob": 0.0, "special": true}, "generated_text": " is", '
            '"details": {"finish_reason": "eos_token", "generated_tokens": 1, "seed": null, "input_length": 2, '
            '"inputs": "Deep Learning"}}',
        ],
        tgi=True,
        steps=STEPS[:1],
    ),
    "tgi-lines": Golden(
        "0.31: tgi_compat with jsonlines, the tokens in TGI's form; a stream may have its prefill there",
        JSONLINES,
        {"details": True, "decoder_input_details": True, "return_full_text": True},
        [
            f'{{"index": 1, "token": {TGI_IS}, "generated_text": null, "details": null}}',
            f'{{"index": 2, "token": {TGI_FIELD}, "generated_text": null, "details": null}}',
            f'{{"index": 3, "token": {TGI_EOS}, "generated_text": "Deep Learning is field.", "details": {{"finish_reason": '
            '"eos_token", "generated_tokens": 3, "seed": null, "input_length": 2, "inputs": "Deep Learning", '
            f'"prefill": {TGI_ASKED}}}}}',
        ],
        tgi=True,
    ),
}
# SSE sends the lines of jsonlines as events. Seed: "the jsonline will have the prefix data"; decision: `data: `.
EVENTS = {f"events-of-{name}": case._replace(formatter=SSE) for name, case in LMI.items() if case.formatter is JSONLINES}
CASES = LMI | EVENTS | TGI


def framed(formatter: Formatter, lines: list[str]) -> bytes:
    """jsonlines: a line feed after each line. SSE: `data: ` and a blank line, the last event's too, and no [DONE]."""
    before, after = {JSON: ("", ""), JSONLINES: ("", "\n"), SSE: ("data: ", "\n\n")}[formatter]
    return "".join(f"{before}{line}{after}" for line in lines).encode()


def request_of(formatter: Formatter, tgi: bool, asked: dict[str, Any], inputs: str = PROMPT) -> TextRequest:
    return TextRequest(inputs=inputs, parameters=Parameters(**asked), formatter=formatter, tgi=tgi)


def play(out: TextEncoder, steps: list[Step], reason: str = "eos_token") -> bytes:
    for token in PREFILL:
        out.prefill(*token)
    return b"".join([*(out.token(*step) for step in steps), out.finish(reason)])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_an_answer_is_byte_for_byte_the_golden_one(case: Golden) -> None:
    request = request_of(case.formatter, case.tgi, case.asked)
    assert play(TextEncoder(request), case.steps) == framed(case.formatter, case.lines)


def test_every_golden_answer_names_its_source() -> None:
    named = re.compile("seed|decision|0.31|TGI")
    assert all(named.match(case.source) for case in CASES.values())


# --- failures


LMI_FAILURE = (
    '{"token": {"id": -1, "text": "", "log_prob": -1, "special_token": true, "error_msg": "lost at \\"3\\""}, '
    '"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null}}'
)
TGI_FAILURE = r'{"error":"lost at \"3\"","error_type":"generation"}'
BODY = r'{"error": "lost at \"3\"", "code": 424'
GENERATION_BODY = (
    '{"generated_text": "", "details": {"finish_reason": "error", "generated_tokens": null, "inputs": null, '
    '"tokens": null}, "error": "lost at \\"3\\"", "code": 424'
)


@pytest.mark.parametrize(
    ("formatter", "tgi", "failure"),
    [
        # seed, Error Responses, When using streaming, less its surplus brace; 0.31: error_msg; decision: framed
        pytest.param(JSONLINES, False, LMI_FAILURE, id="lines"),
        pytest.param(SSE, False, LMI_FAILURE, id="events"),
        # TGI, ErrorResponse in a stream
        pytest.param(JSONLINES, True, TGI_FAILURE, id="tgi-lines"),
        pytest.param(SSE, True, TGI_FAILURE, id="tgi-events"),
        # seed, Error Responses, When not using streaming; decision: plus error and code, and TGI's error_type
        pytest.param(JSON, False, GENERATION_BODY + "}", id="json"),
        pytest.param(JSON, True, GENERATION_BODY + ', "error_type": "generation"}', id="tgi-json"),
    ],
)
def test_a_failure_is_byte_for_byte_the_golden_one(formatter: Formatter, tgi: bool, failure: str) -> None:
    out = TextEncoder(request_of(formatter, tgi, {"details": True}))
    out.token(*STEPS[0])
    assert out.error('lost at "3"') == framed(formatter, [failure])
    assert json.loads(failure)


@pytest.mark.parametrize(
    ("body", "golden"),
    [
        # seed, Error Responses: an issue with payload validation
        pytest.param(error_body('lost at "3"'), BODY + "}", id="payload"),
        pytest.param(LMIError('lost at "3"', stage="payload").body(), BODY + "}", id="payload-raised"),
        # seed: an issue with the request, such as a bad parameter value; decision: plus error and code
        pytest.param(generation_error_body('lost at "3"'), GENERATION_BODY + "}", id="generation"),
        pytest.param(LMIError('lost at "3"', stage="parameters").body(), GENERATION_BODY + "}", id="parameters-raised"),
        pytest.param(LMIError('lost at "3"').body(), GENERATION_BODY + "}", id="generation-raised"),
        # decision: the TGI form adds error_type, TGI's own names
        pytest.param(
            tgi_error_body('lost at "3"', "validation"), BODY + ', "error_type": "validation"}', id="tgi-validation"
        ),
        pytest.param(
            tgi_error_body('lost at "3"', "overloaded", 429),
            r'{"error": "lost at \"3\"", "code": 429, "error_type": "overloaded"}',
            id="tgi-overloaded",
        ),
        pytest.param(
            tgi_error_body('lost at "3"', "generation"),
            GENERATION_BODY + ', "error_type": "generation"}',
            id="tgi-generation",
        ),
        pytest.param(
            tgi_error_body('lost at "3"', "incomplete_generation"),
            GENERATION_BODY + ', "error_type": "incomplete_generation"}',
            id="tgi-incomplete",
        ),
        pytest.param(
            LMIError('lost at "3"', stage="payload").body(tgi=True),
            BODY + ', "error_type": "validation"}',
            id="tgi-payload-raised",
        ),
        pytest.param(
            LMIError('lost at "3"', stage="parameters").body(tgi=True),
            GENERATION_BODY + ', "error_type": "validation"}',
            id="tgi-parameters-raised",
        ),
        pytest.param(
            LMIError('lost at "3"').body(tgi=True), GENERATION_BODY + ', "error_type": "generation"}', id="tgi-raised"
        ),
    ],
)
def test_the_body_of_an_error_is_byte_for_byte_the_golden_one(body: bytes, golden: str) -> None:
    assert body == golden.encode()
    assert json.loads(body)["error"] == 'lost at "3"'


# --- the oracle: what an answer says, as dicts that Python's json writes


def written(text: str) -> str:
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def token_of(id: int, text: str, log_prob: float | None, special: bool, tgi: bool) -> dict[str, Any]:
    number = None if log_prob is None or not math.isfinite(log_prob) else log_prob
    token: dict[str, Any] = {"id": id, "text": written(text), "logprob" if tgi else "log_prob": number}
    if tgi:
        token["special"] = special
    elif special:
        token["special_token"] = True
    return token


class Oracle:
    """The objects of an answer, made of everything that was asked and generated at once."""

    def __init__(self, request: TextRequest, steps: list[Step], reason: str) -> None:
        self.request, self.asked, self.tgi = request, request.parameters, request.tgi
        self.steps, self.reason = steps, reason
        self.streaming = request.formatter is not JSON
        self.several = not self.streaming and max(self.asked.n, self.asked.best_of, self.asked.num_beams) > 1

    def objects(self) -> Iterator[Any]:
        if not self.streaming:
            document: dict[str, Any] = {"generated_text": self.text(0)}
            if self.asked.details or self.several:
                document["details"] = self.details()
            yield [document] if self.tgi else document
            return
        steps = self.of(0)
        if not steps or steps[-1].finish is None:
            steps = [*steps, Step(0, "", 0.0, special=True)]
        for index, step in enumerate(steps, 1):
            event: dict[str, Any] = {"index": index} if self.tgi else {}
            event["token"] = self.token(step)
            if self.tgi and self.asked.top_n_tokens and step.top:
                event["top_tokens"] = self.top(step)
            if index < len(steps):
                yield event | ({"generated_text": None, "details": None} if self.tgi else {})
                continue
            event["generated_text"] = self.text(0)
            if self.asked.details:
                event["details"] = self.details()
            elif self.tgi:
                event["details"] = None
            yield event

    def of(self, sequence: int) -> list[Step]:
        return [step for step in self.steps if step.sequence == sequence]

    def text(self, sequence: int) -> str:
        prompt = written(self.request.inputs) if self.asked.return_full_text else ""
        return prompt + "".join(written(step.text) for step in self.of(sequence))

    def token(self, step: Step) -> dict[str, Any]:
        return token_of(step.id, step.text, step.log_prob, step.special, self.tgi)

    def top(self, step: Step) -> list[dict[str, Any]]:
        return [token_of(t.id, t.text, t.log_prob, t.special, self.tgi) for t in step.top]

    def details(self) -> dict[str, Any]:
        inputs = {"inputs": written(self.request.inputs)}
        account, lists = self.account(0), self.lists(0)
        details = inputs | account | lists if self.several else account | inputs | lists
        others = sorted({step.sequence for step in self.steps} - {0})
        if self.several and others:
            details["best_of_sequences"] = [
                self.account(k) | self.lists(k) | {"generated_text": self.text(k)} for k in others
            ]
        return details

    def account(self, sequence: int) -> dict[str, Any]:
        steps = self.of(sequence)
        said = steps[-1].finish if steps else None
        account: dict[str, Any] = {
            "finish_reason": said or ("eos_token" if sequence else self.reason),
            "generated_tokens": len(steps),
        }
        if self.tgi:
            account["seed"] = self.asked.seed
        if self.tgi and self.streaming:
            account["input_length"] = len(PREFILL)
        return account

    def lists(self, sequence: int) -> dict[str, Any]:
        lists: dict[str, Any] = {}
        if not self.streaming:
            lists["tokens"] = [self.token(step) for step in self.of(sequence)]
        if self.asked.decoder_input_details:
            lists["prefill"] = [token_of(*token, False, self.tgi) for token in PREFILL]
            for token in lists["prefill"]:
                token.pop("special", None)
        elif self.tgi and not self.streaming:
            lists["prefill"] = []
        if self.asked.top_n_tokens:
            lists["top_tokens"] = [self.top(step) for step in self.of(sequence)]
        return lists


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_golden_answer_read_by_pythons_json_says_what_went_in(case: Golden) -> None:
    oracle = Oracle(request_of(case.formatter, case.tgi, case.asked), case.steps, "eos_token")
    assert [json.loads(line) for line in case.lines] == list(oracle.objects())


texts = st.text(
    st.characters() | st.characters(categories=["Cs"]) | st.sampled_from('"\\\n\r\x00\x1f\x7f\x85\u2028\u2029'), max_size=5
)
probabilities = st.none() | st.floats() | st.floats(-30, 0)
tops = st.lists(
    st.builds(TopToken, id=st.integers(0, 9), text=texts, log_prob=probabilities, special=st.booleans()), max_size=2
)
steps_of_any_sequence = st.lists(
    st.builds(
        Step, st.integers(-1, 2**31), texts, probabilities, st.booleans(), st.none(), tops.map(tuple), st.integers(0, 2)
    ),
    max_size=8,
)
parameters = st.fixed_dictionaries(
    {
        "details": st.booleans(),
        "return_full_text": st.booleans(),
        "decoder_input_details": st.booleans(),
        "top_n_tokens": st.integers(0, 2),
        "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
        "n": st.just(3),
        "max_new_tokens": st.just(100),
    }
)


@settings(max_examples=150)
@given(st.sampled_from(list(Formatter)), st.booleans(), parameters, texts, steps_of_any_sequence, st.booleans())
@example(
    JSON, True, {"n": 3, "details": True}, "\ud83d\ude00", [Step(1, '\ud83d"', math.nan), Step(2, "\x00", -math.inf)], False
)
def test_any_answer_is_byte_for_byte_what_pythons_json_makes_of_what_went_in(
    formatter: Formatter, tgi: bool, asked: dict[str, Any], inputs: str, steps: list[Step], last_says_so: bool
) -> None:
    mine = [number for number, step in enumerate(steps) if step.sequence == 0]
    if last_says_so and mine:
        last = mine[-1]
        steps = [*steps[:last], steps[last]._replace(finish="stop_sequence"), *steps[last + 1 :]]
    request = request_of(formatter, tgi, asked, inputs)
    lines = [dumped(item) for item in Oracle(request, steps, "length").objects()]
    assert play(TextEncoder(request), steps, "length") == framed(formatter, lines)


@settings(max_examples=60)
@given(st.booleans(), st.booleans(), parameters, steps_of_any_sequence)
def test_the_texts_of_the_tokens_one_after_another_are_the_generated_text(
    tgi: bool, sse: bool, asked: dict[str, Any], steps: list[Step]
) -> None:
    asked |= {"return_full_text": False, "details": True}
    document = json.loads(play(TextEncoder(request_of(JSON, tgi, asked)), steps))
    document = document[0] if tgi else document
    tokens = document["details"]["tokens"]
    assert document["generated_text"] == "".join(token["text"] for token in tokens)
    for other in document["details"].get("best_of_sequences", []):
        assert other["generated_text"] == "".join(token["text"] for token in other["tokens"])
    stream = play(TextEncoder(request_of(SSE if sse else JSONLINES, tgi, asked)), steps)
    events = [json.loads(line.removeprefix(b"data: ")) for line in stream.split(b"\n") if line]
    assert events[-1]["generated_text"] == document["generated_text"] == "".join(event["token"]["text"] for event in events)
    assert [event["token"] for event in events[:-1]] == tokens
