"""A file of keys: what its lines say, what is wrong with them, and whose key it is that was shown."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.keys import LARGEST, Key, KeyFileError, KeySet, Scope, attributes_of, line_of, new_key, read_keys
from gateway.party import Quota

KEY = "ew_" + "k" * 43
DIGEST = f"sha256:{sha256(KEY.encode()).hexdigest()}"
OTHER = "sha256:" + "0" * 64


def only(text: str) -> Key:
    (key,) = read_keys(text.encode())
    return key


def test_a_line_has_a_name_and_a_digest_and_what_the_key_may() -> None:
    assert only(f"alice {DIGEST}") == Key(name="alice", digest=sha256(KEY.encode()).digest())
    key = only(
        f"\ufeff# ours\r\n\n  a.B-_9\t{DIGEST.upper().replace('SHA', 'sha')} models=chat,embed-* scope=control share=50 rate=2.5 "
        "in_flight=100 priority=3 expires=2027-01-31 # the end\r\n"
    )
    assert (key.name, key.models, key.scope, key.share) == ("a.B-_9", ("chat", "embed-*"), Scope.CONTROL, 50)
    assert (key.rate, key.in_flight, key.priority) == (2.5, 100, 3)
    assert key.expires == datetime(2027, 2, 1, tzinfo=UTC).timestamp()
    assert only(f"a {DIGEST} expires=2027-01-31T12:00:00+02:00").expires == datetime(2027, 1, 31, 10, tzinfo=UTC).timestamp()


def test_a_key_is_found_as_long_as_it_is_not_over_and_shown_nowhere() -> None:
    keys = read_keys(f"alice {DIGEST} expires=2027-01-31\n".encode())
    over = datetime(2027, 2, 1, tzinfo=UTC).timestamp()
    found = keys.find(KEY.encode(), over - 1)
    assert found is not None
    assert found.name == "alice"
    assert keys.find(KEY.encode(), over) is None
    assert keys.find(KEY.encode() + b"x", 0) is None
    assert keys.find(b"", 0) is None
    assert keys.without_those_over(over - 1) is keys
    assert len(keys.without_those_over(over)) == 0
    shown = repr(found) + repr(keys)
    assert KEY not in shown
    assert found.digest.hex() not in shown
    assert repr(found.digest) not in shown


def test_an_empty_file_has_no_key() -> None:
    for text in ("", "# none\n", "\n\n"):
        assert len(read_keys(text.encode())) == 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("a b " + DIGEST, "the digest, which is second, must be sha256: and 64 hexadecimal digits"),
        ("a", "the digest, which is second"),
        (f"a {KEY}", "the digest, which is second"),
        (f"a {DIGEST}0", "the digest, which is second"),
        (f"{'a' * 65} {DIGEST}", "the name, which is first, must be 1 to 64 letters"),
        (f"ä {DIGEST}", "the name, which is first"),
        (f"a {DIGEST} {KEY}", "attributes, such as rate=20, must follow the digest"),
        (f"a {DIGEST} Rate=2", "attributes, such as rate=20, must follow the digest"),
        (f"a {DIGEST} limit=2", "there is no attribute limit: there are models, scope, share, in_flight, rate, priority"),
        (f"a {DIGEST} rate=2 rate=2", "rate is there twice"),
        (f"a {DIGEST} models=", "models must be names of models with commas between them, * for any characters, not ''"),
        (f"a {DIGEST} models=a,,b", "models must be"),
        (f"a {DIGEST} scope=admin", "scope must be infer or control, not 'admin'"),
        (f"a {DIGEST} share=0", "share must be a whole number from 1 to 100, not '0'"),
        (f"a {DIGEST} share=101", "share must be"),
        (f"a {DIGEST} in_flight=0", "in_flight must be a whole number from 1 to"),
        (f"a {DIGEST} rate=0", "rate must be a number above 0"),
        (f"a {DIGEST} rate=-1", "rate must be"),
        (f"a {DIGEST} rate=1e9", "rate must be"),
        (f"a {DIGEST} priority=17", "priority must be a whole number from 1 to 16, not '17'"),
        (f"a {DIGEST} expires=2027-02-30", "expires must be a date such as 2027-01-31"),
        (f"a {DIGEST} expires=2027-01-31T12:00:00", "expires must be"),
        (f"a {DIGEST} expires=tomorrow", "expires must be"),
    ],
)
def test_a_wrong_line_is_named_with_its_attribute(line: str, problem: str) -> None:
    with pytest.raises(KeyFileError) as raised:
        read_keys(f"# first\n{line}\n".encode())
    assert str(raised.value).startswith(f"line 2: {problem}")
    assert KEY not in str(raised.value)
    assert DIGEST[7:] not in str(raised.value)


def test_all_that_is_wrong_is_told() -> None:
    text = f"a {DIGEST}\nb {DIGEST} rate=1\na {OTHER} rate=2\nc\nd\ne\n"
    with pytest.raises(KeyFileError) as raised:
        read_keys(text.encode())
    assert raised.value.problems[:2] == (
        "line 2: the digest is on line 1 already: list each key once",
        "line 3: share, in_flight and rate must be those of line 1, which has the same name",
    )
    assert str(raised.value).endswith("; and 2 more")
    with pytest.raises(KeyFileError, match=r"^line 3: not UTF-8$"):
        read_keys(b"# a\n# b\n# \xff\n")
    with pytest.raises(KeyFileError, match=r"^the file is larger than 1048576 bytes$"):
        read_keys(b"#" * (LARGEST + 1))


def test_several_keys_of_one_name_may_differ_in_what_is_each_keys_own() -> None:
    keys = read_keys(f"a {DIGEST} rate=2 models=x expires=2027-01-31\na {OTHER} rate=2 models=y scope=control\n".encode())
    assert [key.models for key in keys] == [("x",), ("y",)]


@given(st.text("ab*", max_size=6), st.text("ab", max_size=6))
def test_a_pattern_has_any_text_in_the_place_of_each_star(pattern: str, name: str) -> None:
    assert Key(name="a", digest=b"", models=(pattern, "never")).reaches(name) == fnmatchcase(name, pattern)


@given(st.binary(max_size=200))
def test_any_file_is_read_or_refused(data: bytes) -> None:
    with suppress(KeyFileError):
        assert isinstance(read_keys(data), KeySet)


def test_a_new_key_has_the_form_that_a_line_takes() -> None:
    made = new_key()
    assert made != new_key()
    assert only(line_of("alice", made, ["rate=2"])).rate == 2
    assert only(line_of("alice", "x" * 32)).digest == sha256(b"x" * 32).digest()
    for key in ("x" * 31, "ew_short", "ä" * 40, "x" * 20 + " " + "x" * 20):
        with pytest.raises(ValueError, match="a key is ew_ and 43 characters of base64url, or 32 or more"):
            line_of("alice", key)
    with pytest.raises(ValueError, match="the name must be"):
        line_of("a b", made)
    with pytest.raises(ValueError, match="rate must be"):
        attributes_of(["rate=x"])


# -- quotas


def test_a_rate_lets_twice_its_number_go_at_once_and_then_that_many_a_second() -> None:
    quota = Quota()
    quota.set(0, 2.0)
    assert [quota.wait(10.0) for _ in range(4)] == [0.0] * 4
    assert quota.wait(10.0) == 0.5
    assert quota.wait(10.25) == 0.25
    assert quota.wait(10.5) == 0.0
    assert quota.wait(10.5) == 0.5
    assert [quota.wait(1000.0) for _ in range(5)] == [0.0] * 4 + [0.5]


def test_a_rate_below_one_lets_one_go_at_once() -> None:
    quota = Quota()
    quota.set(0, 0.1)
    assert quota.wait(0.0) == 0.0
    assert quota.wait(0.0) == 10.0
    assert quota.wait(10.0) == 0.0


def test_another_number_holds_for_what_runs_already() -> None:
    quota = Quota()
    quota.set(2, 1.0)
    quota.running = 2
    assert quota.wait(0.0) == quota.wait(0.0) == 0.0
    assert quota.wait(0.0) == 1.0
    quota.set(3, 1.0)
    assert (quota.running, quota.at_once, quota.wait(0.0)) == (2, 3, 1.0)
    quota.set(0, 0.0)
    assert quota.wait(0.0) == 0.0
