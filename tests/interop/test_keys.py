"""Real clients with keys, unmodified: each shows one in its own way, and tells its program what a wrong one is told."""

from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.keys import line_of
from tests.interop.conftest import absent
from tests.interop.servers import LIBRARY, Server, serving, tables

pytestmark = pytest.mark.filterwarnings("default")  # the clients' own

KEY, OPS, WRONG = "ew_" + "k" * 43, "ew_" + "o" * 43, "ew_" + "w" * 43
SIGNER = ("AKIDEXAMPLE", "a secret of ours")
PATIENCE = 60


class _Page(http.server.BaseHTTPRequestHandler):
    """Serves the page of a test, and takes what its script has found."""

    server: Pages

    def do_GET(self) -> None:
        page = self.server.page.encode()
        self.send_response(200)
        self.send_header("content-type", "text/html; charset=utf-8")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def do_POST(self) -> None:
        self.server.found = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(204)
        self.end_headers()
        self.server.told.set()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


class Pages(http.server.ThreadingHTTPServer):
    """A web site beside the server: as 127.0.0.1 its origin is listed there, as localhost it is not."""

    daemon_threads = True
    page = ""
    found: Any = None

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Page)
        self.told = threading.Event()


@pytest.fixture(scope="module")
def site() -> Iterator[Pages]:
    with Pages() as pages:
        thread = threading.Thread(target=pages.serve_forever, daemon=True)
        thread.start()
        yield pages
        pages.shutdown()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory, site: Pages) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("keys")
    keys, signers = folder / "keys.txt", folder / "credentials.ini"
    keys.write_text(f"{line_of('alice', KEY, ['models=lm,identity,echo'])}\n{line_of('ops', OPS, ['scope=control'])}\n")
    keys.chmod(0o600)
    signers.write_text(f"[us]\naws_access_key_id = {SIGNER[0]}\naws_secret_access_key = {SIGNER[1]}\n")
    settings = [
        f'access = {{ keys_file = "{keys}", origins = ["http://127.0.0.1:{site.server_port}"] }}',
        f'sagemaker = {{ sigv4 = {{ credentials = "{signers}" }} }}',
        'lmi = { default_model = "lm", tgi_compat = true }',
        'bidi = { default_model = "echo" }',
        "v2 = { model_control = true }",
    ]
    with serving(folder, "served.py", [*settings, *tables(LIBRARY)]) as server:
        yield server


# -- curl


def run(curl: str, *arguments: str) -> str:
    return subprocess.run([curl, "-sS", "--max-time", "60", *arguments], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "shown", [("-H", "authorization: Bearer {}"), ("-H", "x-api-key: {}"), ("-u", "anybody:{}"), ("-u", ":{}")]
)
def test_curl_shows_a_key_as_a_field_or_as_a_password(keyed: Server, curl: str, shown: tuple[str, str]) -> None:
    for key, status in ((KEY, "200"), (WRONG, "401")):
        said = run(curl, shown[0], shown[1].format(key), "-w", "\n%{http_code}", f"{keyed.url}/v2/models")
        assert said.endswith(f"\n{status}")
    assert json.loads(run(curl, "-H", f"x-api-key: {KEY}", f"{keyed.url}/v2/models"))["models"] == ["echo", "identity", "lm"]
    assert run(curl, "-o", "/dev/null", "-w", "%{http_code}", f"{keyed.url}/ping") == "200"


def test_curl_manages_models_with_the_form_that_it_says_by_itself(keyed: Server, curl: str) -> None:
    for key, status in ((KEY, "403"), (OPS, "200")):
        said = run(curl, "-H", f"x-api-key: {key}", "-d", "{}", "-w", "\n%{http_code}", f"{keyed.url}/v2/repository/index")
        assert said.endswith(f"\n{status}")


# -- OpenAI's and Hugging Face's


def test_openai_has_a_key_as_every_program_of_it(keyed: Server, needs: Callable[[str, str], Any]) -> None:
    openai = needs("openai", "openai")
    asked = {"model": "lm", "messages": [{"role": "user", "content": "Return the"}], "max_tokens": 3, "temperature": 0}
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, timeout=PATIENCE, max_retries=0) as client:
        assert client.chat.completions.create(**asked).usage.completion_tokens == 3
        assert [model.id for model in client.models.list()] == ["echo", "lm"]
        with pytest.raises(openai.NotFoundError) as missing:
            client.models.retrieve("add_sub")
        assert missing.value.code == "model_not_found"
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=WRONG, timeout=PATIENCE, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            client.chat.completions.create(**asked)
        assert refused.value.code == "invalid_api_key"


def test_huggingface_hub_has_a_token(keyed: Server, needs: Callable[[str, str], Any]) -> None:
    hub = needs("huggingface_hub", "huggingface_hub")
    client = hub.InferenceClient(base_url=f"{keyed.url}/v1", token=KEY, timeout=PATIENCE)
    answer = client.chat_completion([{"role": "user", "content": "Return the"}], model="lm", max_tokens=3, temperature=0)
    assert answer.usage.completion_tokens == 3
    wrong = hub.InferenceClient(base_url=f"{keyed.url}/v1", token=WRONG, timeout=PATIENCE)
    with pytest.raises(Exception, match="401"):
        wrong.chat_completion([{"role": "user", "content": "Return the"}], model="lm", max_tokens=3, temperature=0)


def test_text_generation_has_headers(keyed: Server, needs: Callable[[str, str], Any]) -> None:
    tgi = needs("text_generation", "text_generation")
    client = tgi.Client(f"{keyed.url}/predictions/lm", headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE)
    assert len(list(client.generate_stream("Return the", max_new_tokens=3))) == 3
    wrong = tgi.Client(f"{keyed.url}/predictions/lm", headers={"x-api-key": WRONG}, timeout=PATIENCE)
    with pytest.raises(Exception, match="the key is unknown"):
        wrong.generate("Return the", max_new_tokens=3)


# -- tritonclient


def test_tritonclient_has_headers_with_each_call(keyed: Server, needs: Callable[[str, str], Any]) -> None:
    triton = needs("tritonclient", "tritonclient.http")
    utils = needs("tritonclient", "tritonclient.utils")
    array = np.arange(4, dtype=np.float32).reshape(1, 4)
    tensor = triton.InferInput("INPUT0", [1, 4], "FP32")
    tensor.set_data_from_numpy(array)
    shown = {"authorization": f"Bearer {KEY}"}
    with triton.InferenceServerClient(f"{keyed.host}:{keyed.port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        result = client.infer("identity", [tensor], headers=shown)
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), array)
        assert client.get_server_metadata(headers=shown)["name"] == "everywire"
        for wrong in (None, {"authorization": f"Bearer {WRONG}"}):
            with pytest.raises(utils.InferenceServerException) as refused:
                client.infer("identity", [tensor], headers=wrong)
            assert refused.value.status() == "401"
        for name in ("add_sub", "none"):
            with pytest.raises(utils.InferenceServerException) as refused:
                client.infer(name, [tensor], headers=shown)
            assert refused.value.status() == "403"
        with pytest.raises(utils.InferenceServerException) as refused:
            client.get_model_repository_index(headers=shown)
        assert refused.value.status() == "403"
        assert {model["name"] for model in client.get_model_repository_index(headers={"x-api-key": OPS})} >= {
            "add_sub",
            "lm",
        }


# -- boto3


def test_boto3_signs_and_may_show_a_key_beside(keyed: Server, needs: Callable[[str, str], Any]) -> None:
    boto3, config = needs("boto3", "boto3"), needs("boto3", "botocore.config").Config
    errors = needs("boto3", "botocore.exceptions")

    def client(secret: str = SIGNER[1], key: str = "") -> Any:
        session = boto3.session.Session(aws_access_key_id=SIGNER[0], aws_secret_access_key=secret, region_name="us-east-1")
        once = config(retries={"total_max_attempts": 1}, read_timeout=PATIENCE)
        made = session.client("sagemaker-runtime", endpoint_url=keyed.url, config=once)
        if key:
            made.meta.events.register(
                "before-sign.sagemaker-runtime", lambda request, **_: request.headers.add_header("x-api-key", key)
            )
        return made

    asked = {
        "EndpointName": "lm",
        "Body": b'{"inputs":"Return the","parameters":{"max_new_tokens":3}}',
        "ContentType": "application/json",
    }
    for good in (client(), client(key=KEY)):
        assert b"generated_text" in good.invoke_endpoint(**asked)["Body"].read()
    for bad, code in (
        (client(secret="another"), "InvalidSignatureException"),
        (client(secret="another", key=KEY), "InvalidSignatureException"),
        (client(key=WRONG), "UnrecognizedClientException"),
    ):
        with pytest.raises(errors.ClientError) as refused:
            bad.invoke_endpoint(**asked)
        assert refused.value.response["Error"]["Code"] == code
    endpoint = {**asked, "EndpointName": "add-sub"}
    with pytest.raises(errors.ClientError):
        client(key=KEY).invoke_endpoint(**endpoint)


# -- a browser

_SCRIPT = """<!doctype html><script>
const gateway = GATEWAY, key = KEY, found = {};
const read = (path, how) => fetch(gateway + path, how).then(answer => answer.status, () => "failed");
const keyed = {authorization: "Bearer " + key}, json = {...keyed, "content-type": "application/json"};
const infer = JSON.stringify({inputs: [{name: "INPUT0", datatype: "FP32", shape: [1, 1], data: [7]}]});
const socket = protocols => new Promise(done => {
  const ws = new WebSocket(gateway.replace("http", "ws") + "/v2/models/identity/infer", protocols);
  ws.onopen = () => ws.send(infer);
  ws.onmessage = message => { done([ws.protocol, JSON.parse(message.data).outputs[0].data]); ws.close(); };
  ws.onerror = () => done("failed");
});
(async () => {
  found.get = await read("/v1/models", {headers: keyed});
  found.without = await read("/v1/models", {});
  found.infer = await read("/v2/models/identity/infer", {method: "POST", headers: json, body: infer});
  found.unload = await read("/v2/repository/models/echo/unload", {method: "POST", headers: json, body: "{}"});
  found.simple = await fetch(gateway + "/v2/repository/models/echo/unload", {method: "POST", mode: "no-cors", body: "{}"})
    .then(answer => answer.type, () => "failed");
  found.exposed = await fetch(gateway + "/v1/models", {headers: keyed})
    .then(answer => answer.headers.get("x-request-id") !== null, () => "failed");
  found.socket = await socket(["everywire.key." + key, "app.v1"]);
  found.stranger = await socket(["app.v1"]);
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""


@pytest.fixture(scope="session")
def chromium() -> str:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        absent("chromium")
    assert path is not None
    return path


@contextmanager
def browsing(chromium: str, url: str, folder: Path) -> Iterator[None]:
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
    ]
    process = subprocess.Popen(
        [chromium, *flags, f"--user-data-dir={folder}", url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


def found_by(chromium: str, keyed: Server, site: Pages, host: str, key: str, folder: Path) -> dict[str, Any]:
    """The results of the script on the page of this host."""
    site.page = _SCRIPT.replace("GATEWAY", json.dumps(keyed.url)).replace("KEY", json.dumps(key), 1)
    site.told.clear()
    with browsing(chromium, f"http://{host}:{site.server_port}/", folder):
        assert site.told.wait(PATIENCE), "the browser has found nothing"
    found: dict[str, Any] = site.found
    return found


def test_a_page_of_a_listed_origin_calls_models_with_its_key(
    keyed: Server, site: Pages, chromium: str, tmp_path: Path
) -> None:
    found = found_by(chromium, keyed, site, "127.0.0.1", KEY, tmp_path)
    assert found == {
        "get": 200, "without": 401, "infer": 200, "unload": 403, "simple": "opaque", "exposed": True,
        "socket": ["app.v1", [7]], "stranger": "failed",
    }  # fmt: skip


def test_a_page_of_another_site_reads_nothing_and_changes_nothing(
    keyed: Server, site: Pages, chromium: str, curl: str, tmp_path: Path
) -> None:
    found = found_by(chromium, keyed, site, "localhost", OPS, tmp_path)
    assert found == {
        "get": "failed", "without": "failed", "infer": "failed", "unload": "failed", "simple": "opaque", "exposed": "failed",
        "socket": "failed", "stranger": "failed",
    }  # fmt: skip
    ready = f"{keyed.url}/v2/models/echo/ready"
    assert run(curl, "-H", f"x-api-key: {OPS}", "-o", "/dev/null", "-w", "%{http_code}", ready) == "200"
