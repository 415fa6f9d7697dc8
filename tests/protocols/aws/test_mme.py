"""The multi-model container API: what loads a model, pages that models come and go between, and the bodies of answers."""

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.aws.multi_model import (
    MAX_NAME,
    MAX_PAGE,
    MAX_URL,
    MMEError,
    ModelToLoad,
    MultiModelErrorType,
    PageRequest,
    error_body,
    loaded_body,
    model_body,
    page_body,
    parse_load,
    parse_page,
    unloaded_body,
)

NAME = "6f1ed002ab5595859014ebf0951522d9"
URL = f"/opt/ml/models/{NAME}/model"
# A walk asks with what the last page gave, percent-decoded: nothing in a token needs that.
URL_SAFE = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def load(**members):
    return parse_load(json.dumps(members).encode())


# ---- load


def test_a_load_names_a_model_and_where_it_lies():
    assert parse_load(f'{{ "model_name" : "{NAME}", "url" : "{URL}" }}'.encode()) == ModelToLoad(name=NAME, url=URL)
    assert load(model_name="a b", url="x", initial_workers=[1, None]) == ModelToLoad(name="a b", url="x")


def test_the_contracts_own_example_has_a_comma_too_many_and_is_refused():
    # "Load Model API": { "model_name" : "{model_name}", "url" : "/opt/ml/models/{model_name}/model", }
    with pytest.raises(MMEError, match="not JSON") as caught:
        parse_load(b'{ "model_name" : "{model_name}", "url" : "/opt/ml/models/{model_name}/model", }')
    assert (caught.value.status, caught.value.errortype) == (400, MultiModelErrorType.BAD_REQUEST)
    assert "model_name" in caught.value.message


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "empty where JSON was expected; a JSON object with model_name and url is needed"),
        (b"  \n", "empty where JSON was expected"),
        (b"{", "not JSON"),
        (b"model_name=a&url=b", "not JSON"),
        (b'{"model_name":"\xff","url":"u"}', "not"),
        (b'{"model_name":"\\ud800","url":"u"}', "not JSON"),
        (b'{"model_name":"a","url":"u"} {}', "not JSON"),
        (b"[" * 100_000, "nested deeper than 8"),
        (b'{"model_name":"a","model_name":"b","url":"u"}', "two members 'model_name'"),
        (b'["a","b"]', "must be a JSON object with model_name and url"),
        (b"null", "must be a JSON object"),
        (b"{}", "model_name must be a string, it is missing"),
        (b'{"url":"u"}', "model_name must be a string, it is missing"),
        (b'{"modelName":"a","url":"u"}', "model_name must be a string, it is missing"),
        (b'{"model_name":"a"}', "url must be a string, it is missing"),
        (b'{"model_name":"a","url":null}', "url must be a string, it is missing"),
        (b'{"model_name":"","url":"u"}', "model_name must be a string, it is empty"),
        (b'{"model_name":"a","url":""}', "url must be a string, it is empty"),
        (b'{"model_name":1,"url":"u"}', "model_name must be a string, got a number"),
        (b'{"model_name":1.5,"url":"u"}', "model_name must be a string, got a number"),
        (b'{"model_name":true,"url":"u"}', "model_name must be a string, got a boolean"),
        (b'{"model_name":["a"],"url":"u"}', "model_name must be a string, got an array"),
        (b'{"model_name":"a","url":{}}', "url must be a string, got an object"),
        (b'{"model_name":"a\\u0000","url":"u"}', r"model_name must not have control characters, got U\+0000 at position 1"),
        (b'{"model_name":"a","url":"x\\u0000y"}', r"url must not have control characters, got U\+0000 at position 1"),
        (b'{"model_name":"a","url":"\\u009b"}', r"url must not have control characters, got U\+009B at position 0"),
        (b'{"model_name":"a\\r\\nb","url":"u"}', "model_name must not have control characters"),
        (b'{"model_name":"a/b","url":"u"}', "model_name is one segment of a path.*got 'a/b'"),
        (b'{"model_name":"..","url":"u"}', "model_name is one segment of a path.*got '..'"),
        (b'{"model_name":".","url":"u"}', "model_name is one segment of a path"),
    ],
)
def test_a_body_that_loads_nothing_is_refused_with_the_member_it_lacks(body, told):
    with pytest.raises(MMEError, match=told):
        parse_load(body)


@pytest.mark.parametrize(("member", "longest"), [("model_name", MAX_NAME), ("url", MAX_URL)])
def test_a_name_has_1024_bytes_and_a_url_4096_and_not_one_more(member, longest):
    others = {"model_name": "a", "url": "u"}
    for letter, size in (("a", 1), ("é", 2), ("\U0001f600", 4)):
        taken = load(**others | {member: letter * (longest // size)})
        assert letter * (longest // size) in (taken.name, taken.url)
        with pytest.raises(MMEError, match=f"^{member} has at most {longest} bytes of UTF-8, got {longest + size}"):
            load(**others | {member: letter * (longest // size + 1)})


def test_a_refusal_does_not_echo_a_long_name():
    with pytest.raises(MMEError) as caught:
        load(model_name="/" * 1000, url="u")
    assert len(caught.value.message) < 200


@settings(max_examples=100)
@given(st.binary(max_size=60) | st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["model_name", "url"]) | st.text(max_size=5), v, max_size=3), max_leaves=5).map(lambda v: json.dumps(v).encode()))  # fmt: skip
def test_no_body_breaks_the_reader(body):
    try:
        request = parse_load(body)
    except MMEError:
        pass
    else:
        assert 0 < len(request.name) <= MAX_NAME
        assert "/" not in request.name
        assert 0 < len(request.url) <= MAX_URL


# ---- pages


def page(models, limit=None, token=None):
    got = json.loads(page_body(models, parse_page(limit, token)))
    assert got.keys() <= {"models", "nextPageToken"}
    return [m["modelName"] for m in got["models"]], got.get("nextPageToken")


def models_of(*names):
    return [(name, f"/models/{name}") for name in names]


def test_a_list_is_this_body():
    assert page_body([("b", "/b"), ("a", "/a")], PageRequest()) == (
        b'{"models":[{"modelName":"a","modelUrl":"/a"},{"modelName":"b","modelUrl":"/b"}]}'
    )
    assert page_body([("b", "/b"), ("a", "/a")], PageRequest(limit=1)) == (
        b'{"models":[{"modelName":"a","modelUrl":"/a"}],"nextPageToken":"YWZ0ZXI6YQ"}'
    )
    assert page_body([], PageRequest()) == b'{"models":[]}'


@pytest.mark.parametrize(
    ("count", "pages"), [(99, [99]), (100, [100]), (101, [100, 1]), (200, [100, 100]), (201, [100, 100, 1])]
)
def test_a_walk_of_any_length_ends_in_a_page_that_is_not_empty(count, pages):
    names = [f"m{i:03}" for i in range(count)]
    models = models_of(*reversed(names))
    seen, sizes, token = [], [], None
    while True:
        shown, token = page(models, token=token)
        seen += shown
        sizes.append(len(shown))
        if token is None:
            break
    assert (seen, sizes) == (names, pages)


def test_no_model_is_skipped_or_told_twice_when_others_come_and_go_between_two_pages():
    first, token = page(models_of("a", "b", "c", "d", "e"), "3")
    assert first == ["a", "b", "c"]
    assert page(models_of("d", "e"), "3", token) == (["d", "e"], None)  # the whole first page was unloaded
    assert page(models_of("a", "aa", "b", "bb", "c", "d", "e"), "3", token) == (["d", "e"], None)  # some were loaded
    assert page(models_of("a", "b"), "3", token) == ([], None)  # and those behind are gone
    assert page(models_of("c", "cc"), "3", token) == (["cc"], None)


@pytest.mark.parametrize(("text", "limit"), [("1", 1), ("99", 99), ("100", 100), ("0007", 7)])
def test_a_limit_from_1_to_100_is_kept(text, limit):
    assert parse_page(text).limit == limit


@pytest.mark.parametrize("text", [None, "", "0", "101", "-1", "+1", " 1", "1_0", "1.0", "abc", "٣", "1" * 5000, "9" * 20])
def test_any_other_limit_is_100(text):
    assert parse_page(text) == PageRequest(limit=MAX_PAGE, after="")


@pytest.mark.parametrize(
    "token",
    [
        None,
        "",
        "0",
        "2",
        "100",
        "1000",  # base64, of bytes that are no text
        "AAAA",
        base64.urlsafe_b64encode(b"a").decode(),
        base64.urlsafe_b64encode(b"a").decode().rstrip("="),
        base64.urlsafe_b64encode(b"after:\xff").decode().rstrip("="),
        "YWZ0ZXI6Y",  # one of ours, cut
        "YWZ0 ZXI6YQ",
        "é",
        "\ud800",
        "A" * 10_000,
    ],
)
def test_an_offset_and_any_other_token_that_is_not_ours_begins_anew(token):
    assert parse_page("1", token) == PageRequest(limit=1, after="")
    assert page(models_of("a", "b"), "1", token)[0] == ["a"]


@settings(max_examples=100)
@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20), max_size=12), st.integers(1, 4))
def test_every_walk_tells_each_name_once_in_order(names, limit):
    models, seen, token = models_of(*names), [], None
    while True:
        shown, token = page(models, str(limit), token)
        seen += shown
        if token is None:
            break
        assert len(shown) == limit
        assert set(token) <= URL_SAFE
    assert seen == sorted(names)


def test_the_longest_name_makes_a_token_that_is_read_back():
    longest = "\U0001f600" * (MAX_NAME // 4)
    _, token = page(models_of(longest, longest + "z"), "1")
    assert parse_page("1", token).after == longest


@settings(max_examples=100)
@given(st.text(), st.text())
def test_no_query_breaks_the_reader(limit, token):
    assert 1 <= parse_page(limit, token).limit <= MAX_PAGE


# ---- answers


def test_a_model_is_one_object():
    assert model_body(NAME, URL) == f'{{"modelName":"{NAME}","modelUrl":"{URL}"}}'.encode()


def test_a_load_and_an_unload_are_answered_in_peers_words():
    assert loaded_body("a") == b'{"status":"Model \\"a\\" registered"}'
    assert json.loads(unloaded_body('a"b')) == {"status": 'Model "a"b" unregistered'}


@pytest.mark.parametrize(
    ("errortype", "status", "name"),
    [
        (MultiModelErrorType.BAD_REQUEST, 400, "BadRequestException"),
        (MultiModelErrorType.NOT_FOUND, 404, "ResourceNotFoundException"),
        (MultiModelErrorType.MODEL_NOT_FOUND, 404, "ModelNotFoundException"),
        (MultiModelErrorType.METHOD_NOT_ALLOWED, 405, "MethodNotAllowedException"),
        (MultiModelErrorType.CONFLICT, 409, "ConflictStatusException"),
        (MultiModelErrorType.INTERNAL, 500, "InternalServerException"),
        (MultiModelErrorType.UNAVAILABLE, 503, "ServiceUnavailableException"),
        (MultiModelErrorType.INSUFFICIENT_STORAGE, 507, "InsufficientStorageException"),
    ],
)
def test_an_error_has_code_type_and_message(errortype, status, name):
    assert errortype.status == status
    assert error_body(errortype, "é") == f'{{"code":{status},"type":"{name}","message":"é"}}'.encode()


def test_a_name_from_a_path_that_utf8_cannot_carry_does_not_break_the_error():
    assert (
        json.loads(error_body(MultiModelErrorType.MODEL_NOT_FOUND, "Model not found: \ud800"))["message"]
        == "Model not found: ?"
    )
