"""The party that an exchange counts for: its connection, the subject of its client's certificate, or its key."""

import gc

from gateway.party import Parties


def test_all_who_show_a_certificate_of_one_subject_are_one_party() -> None:
    parties = Parties()
    alice = parties.of_certificate("CN=alice")

    assert parties.of_certificate("CN=alice") is alice
    assert parties.of_certificate("CN=bob") is not alice


def test_a_peer_is_not_taken_for_a_certificate_of_the_same_text() -> None:
    parties = Parties()
    known = parties.of_certificate("CN=alice")

    assert parties.of_peer("CN=alice") is not known


def test_a_party_that_nobody_knows_any_more_is_forgotten() -> None:
    parties = Parties()
    for number in range(100):
        parties.of_certificate(f"CN={number}")
    gc.collect()

    assert not parties._known
