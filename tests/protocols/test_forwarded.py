"""Clients of forwarded requests: lists of proxies, walked from the right, and what clients put into them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.forwarded import IPAddress, Node, client_of

TRUSTED = ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_network("fd00::/8")


def trusts(address: IPAddress) -> bool:
    return any(address in network for network in TRUSTED)


def told(node: Node | None) -> str:
    return "" if node is None else f"{node.address}" + ("" if node.port is None else f" {node.port}")


def by_list(*values: str) -> str:
    return told(client_of([], [value.encode("latin-1") for value in values], trusts))


def by_forwarded(*values: str) -> str:
    return told(client_of([value.encode("latin-1") for value in values], [], trusts))


@pytest.mark.parametrize(
    ("values", "client"),
    [
        (["203.0.113.7"], "203.0.113.7"),
        (["203.0.113.7:4711"], "203.0.113.7 4711"),
        (["2001:DB8::7"], "2001:db8::7"),
        (["[2001:db8::7]"], "2001:db8::7"),
        (["[2001:db8::7]:80"], "2001:db8::7 80"),
        (["::ffff:203.0.113.7"], "203.0.113.7"),
        # the last one that is not trusted, whatever is said before it
        (["6.6.6.6, 203.0.113.7"], "203.0.113.7"),
        (["203.0.113.7, 10.0.0.1,10.0.0.2"], "203.0.113.7"),
        (["6.6.6.6, 10.6.6.6, 203.0.113.7, ::ffff:10.0.0.1"], "203.0.113.7"),
        (["6.6.6.6", "203.0.113.7, 10.0.0.1", "fd00::1"], "203.0.113.7"),
        (["garbage, 203.0.113.7"], "203.0.113.7"),
        # all of them proxies: the first
        (["10.0.0.1, 10.0.0.2"], "10.0.0.1"),
        # as far as it can be told
        (["203.0.113.7, unknown, 10.0.0.1"], "10.0.0.1"),
        (["203.0.113.7, unknown"], ""),
        (["203.0.113.7, 1.2.3"], ""),
        (["203.0.113.7, 1.2.3.4:99999"], ""),
        (["203.0.113.7, fe80::1%eth0"], ""),
        (["unix:"], ""),
        # empty elements are none
        (["203.0.113.7, , ,", "", " , "], "203.0.113.7"),
        ([""], ""),
        ([], ""),
    ],
)
def test_a_list_is_walked_from_its_right_end(values: list[str], client: str) -> None:
    assert by_list(*values) == client


@pytest.mark.parametrize(
    ("values", "client"),
    [
        # RFC 7239, sections 4, 6 and 7.1
        (["for=192.0.2.43"], "192.0.2.43"),
        (['For="[2001:db8:cafe::17]:4711"'], "2001:db8:cafe::17 4711"),
        (["for=192.0.2.60;proto=http;by=203.0.113.43"], "192.0.2.60"),
        (["for=192.0.2.43, for=198.51.100.17"], "198.51.100.17"),
        (['for="192.0.2.43:47011"'], "192.0.2.43 47011"),
        (['for="[2001:db8::1]:_port"'], "2001:db8::1"),
        (["for=192.0.2.43, for=10.0.0.1;by=10.0.0.2"], "192.0.2.43"),
        (["for=192.0.2.43", "for=10.0.0.1"], "192.0.2.43"),
        (['for="_gazonk"'], ""),
        (["for=192.0.2.43, for=unknown"], ""),
        (["for=192.0.2.43, for=_hidden, for=10.0.0.1"], "10.0.0.1"),
        # a proxy that does not name its client
        (["for=192.0.2.43, proto=https;by=10.0.0.1"], ""),
        # forms of proxies that the RFC does not have
        (["for=192.0.2.43:80 ; proto=http"], "192.0.2.43 80"),
        (["for=[::1]:80"], "::1 80"),
        (['for="\\1\\92.0.2.43"'], "192.0.2.43"),
        ([", for=192.0.2.43;, ,"], "192.0.2.43"),
        ([""], ""),
        # malformed
        (["for=192.0.2.43;for=6.6.6.6"], ""),
        (["for = 192.0.2.43"], ""),
        (["for=192.0.2.43 6.6.6.6"], ""),
        (["192.0.2.43"], ""),
        (["for="], ""),
        (["for=6.6.6.6", "for=\xff"], ""),
    ],
)
def test_forwarded_is_walked_from_its_right_end(values: list[str], client: str) -> None:
    assert by_forwarded(*values) == client


@pytest.mark.parametrize("by_proxy", ["for=203.0.113.7", 'for="[2001:db8::7]:1"', 'for="203.0.113.7:1";proto=http'])
@pytest.mark.parametrize(
    "by_client",
    ['for="', 'for=6.6.6.6;x="', 'for=6.6.6.6, for="6.6.6.6', 'for=6.6.6.6;x="\\', '"', "for=6.6.6.6 x", ";;=", "\\"],
)
def test_no_quote_that_a_client_opens_names_another(by_client: str, by_proxy: str) -> None:
    """A proxy appends without looking. By an open quote a client may hide its address, but not pretend to have another."""
    for joined in ([f"{by_client}, {by_proxy}"], [by_client, by_proxy]):
        assert "6.6.6.6" not in by_forwarded(*joined)


@pytest.mark.parametrize(
    ("forwarded", "listed"),
    [
        ([], [b"10.0.0.1," * 3000]),
        ([], [b"10.0.0.1"] * 3000),
        ([b"for=10.0.0.1"] * 3000, []),
        ([b"for=10.0.0.1," * 300], []),
    ],
)
def test_a_client_that_names_thousands_of_proxies_makes_no_work_of_it(forwarded: list[bytes], listed: list[bytes]) -> None:
    asked = 0

    def counting(address: IPAddress) -> bool:
        nonlocal asked
        asked += 1
        return trusts(address)

    assert told(client_of(forwarded, listed, counting)) == "10.0.0.1"
    assert asked < 100


def test_a_line_of_forwarded_beyond_4_kib_names_nobody() -> None:
    long = 'for=203.0.113.7;x="' + "x" * 4096 + '"'
    assert by_forwarded(long) == ""
    assert by_forwarded(long, "for=198.51.100.1, for=10.0.0.1") == "198.51.100.1"


def test_a_line_of_forwarded_with_more_pairs_than_it_can_need_names_nobody() -> None:
    assert by_forwarded("a=b," * 510 + "for=203.0.113.7") == "203.0.113.7"
    assert by_forwarded("a=b," * 511 + "for=203.0.113.7") == ""


def test_of_two_fields_that_do_not_agree_neither_is_believed() -> None:
    ours, theirs = b"203.0.113.7", b"for=6.6.6.6"
    assert client_of([theirs], [ours], trusts) is None
    assert client_of([b"for=unknown"], [ours], trusts) is None
    assert told(client_of([b'for="203.0.113.7:80"'], [ours], trusts)) == "203.0.113.7 80"


_WORDS = st.sampled_from(
    [
        "for=",
        "by=",
        ",",
        ";",
        '"',
        "\\",
        " ",
        "10.0.0.1",
        "203.0.113.7",
        "[",
        "]",
        "::1",
        ":80",
        "unknown",
        "_x",
        "=",
        "\t",
        "é",
    ]
)


@given(
    st.lists(st.lists(_WORDS | st.text(st.characters(max_codepoint=255), max_size=3), max_size=12).map("".join), max_size=3)
)
def test_garbage_names_somebody_or_nobody(values: Sequence[str]) -> None:
    data = [value.encode("latin-1") for value in values]
    for node in (client_of(data, [], trusts), client_of([], data, trusts)):
        assert node is None or isinstance(node, Node)
    # a line that a trusted proxy appends is always read as it is
    assert told(client_of([], [*data, b"198.51.100.1"], trusts)) == "198.51.100.1"
    assert told(client_of([*data, b"for=198.51.100.1"], [], trusts)) == "198.51.100.1"
    assert told(client_of([], [(",".join(values) + ",198.51.100.1").encode("latin-1")], trusts)) == "198.51.100.1"
