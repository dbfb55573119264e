"""The example server: started offline on a pre-downloaded kernel, asked by many at once, compared with eager."""

import json
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import package
import pytest
import torch
from users import REPO, child_environment

pytest.importorskip("fastapi")
EXAMPLE = package.ROOT / "examples" / "serving"
SERVER = EXAMPLE / "serve.py"
WORDS = [f"w{index}" for index in range(120)]
NEW_TOKENS = 8
LAYERS = 3
PROMPTS = [" ".join(WORDS[start : start + 3 + start % 5]) for start in range(0, 80, 5)]


def save_tokenizer(folder) -> dict[str, int]:
    """A tokenizer of 120 words; returns what a model's config has to know of it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: index for index, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return {"vocab_size": len(vocabulary), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny Gemma 3 with random weights."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **save_tokenizer(folder))).save_pretrained(folder)
    return folder


@pytest.fixture
def silu_model_folder(tmp_path):
    """A tiny Llama: blocks of the same parts, gated by SiLU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SIZES, **save_tokenizer(tmp_path))).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def expected(model_folder) -> list[str]:
    """Eager's greedy answers to PROMPTS."""
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = Gemma3ForCausalLM.from_pretrained(model_folder).eval()
    answers = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(tokenizer.decode(out[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))
    assert len(set(answers)) > 4  # a model that always says the same would prove nothing
    return answers


@pytest.fixture(scope="module")
def kernel_home(shared_hub, tmp_path_factory):
    """A cache with the kernel in it, filled by the Dockerfile's own command."""
    home = tmp_path_factory.mktemp("image")
    command = re.search(r"^RUN hf (.*)$", (EXAMPLE / "Dockerfile").read_text(), re.MULTILINE)[1]
    program = Path(sys.executable).with_name("hf")
    environment = child_environment(shared_hub, home)
    subprocess.run([program, *shlex.split(command)], env=environment, check=True, capture_output=True)
    return home


def offline(hub, home) -> dict[str, str]:
    """An environment without a network: what is not in `home` is not to be had."""
    return child_environment(hub, home, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")


@contextmanager
def server(environment, folder, *arguments):
    """The address of a server that is ready; it is terminated at the end, and must then end by itself, in peace."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, SERVER, folder, "--device", "cpu", "--host", "127.0.0.1", "--port", port, *arguments]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen([str(part) for part in command], env=environment, stderr=said)
        url = f"http://127.0.0.1:{port}"
        try:
            deadline = time.monotonic() + 120
            while not answers(url):
                assert child.poll() is None and time.monotonic() < deadline, read(said)
                time.sleep(0.1)
            yield url
        finally:
            child.terminate()
            child.wait(timeout=30)
        assert child.returncode in (0, -15)
        assert "Traceback" not in read(said)


def read(file) -> str:
    file.seek(0)
    return file.read()


def answers(url: str) -> bool:
    try:
        get(f"{url}/health")
    except urllib.error.URLError:
        return False
    return True


def get(url: str):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def post(url: str, body: bytes):
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def complete(url: str, folder, prompt: str) -> str:
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    return post(f"{url}/v1/completions", json.dumps(body).encode())["choices"][0]["text"]


def ask_all(url: str, folder) -> list[str]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda prompt: complete(url, folder, prompt), PROMPTS))


# Body of a completion request, and what the answer says of it.
BAD_REQUESTS = [
    (b"{", 422, "JSON decode error"),
    (b'{"prompt": ["w1"]}', 400, "prompt must be a string"),
    (b'{"prompt": "w1", "max_tokens": -1}', 400, "must be greater than 0"),
    (b'{"prompt": "w1", "max_tokens": "many"}', 400, "'many'"),
    (b'{"prompt": "w1", "nonsense": 1}', 422, "nonsense"),
    (b'{"prompt": "w1", "model": "other"}', 400, "requested 'other'"),
]


def test_concurrent_requests_get_eagers_answers(shared_hub, kernel_home, model_folder, expected):
    with server(offline(shared_hub, kernel_home), model_folder) as url:
        health = get(f"{url}/health")
        build = health["kernel"].pop("build")
        assert health == {
            "status": "ok",
            "kernel": {"repository": REPO, "version": 1, "layers": LAYERS, "of": LAYERS},
        }
        assert re.fullmatch(r"_geglu_cpu_[0-9a-f]+", build)
        assert ask_all(url, model_folder) == expected
        for body, code, reason in BAD_REQUESTS:
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(f"{url}/v1/completions", body)
            assert refused.value.code == code and reason in refused.value.read().decode(), body
        for route in ("/load_model", "/reset"):  # it serves one model, and keeps it
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(f"{url}{route}", b'{"model": "other"}')
            assert refused.value.code == 404
        assert complete(url, model_folder, PROMPTS[0]) == expected[0]


def test_continuous_batching_with_a_kernel_from_a_folder(shared_hub, model_folder, expected, tmp_path):
    arguments = ("--kernel", package.repository(), "--continuous-batching")
    with server(offline(shared_hub, tmp_path), model_folder, *arguments) as url:
        kernel = get(f"{url}/health")["kernel"]
        assert kernel["repository"] == str(package.repository()) and kernel["version"] is None
        assert kernel["layers"] == kernel["of"] == LAYERS
        assert ask_all(url, model_folder) == expected
        assert get(f"{url}/health")["status"] == "ok"


def test_eager_on_request(shared_hub, model_folder, tmp_path):
    with server(offline(shared_hub, tmp_path), model_folder, "--eager") as url:
        assert get(f"{url}/health") == {"status": "ok", "kernel": None}


def failed_start(environment, folder, *arguments) -> str:
    command = [sys.executable, SERVER, folder, "--device", "cpu", *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert child.returncode == 1 and "Traceback" not in child.stderr
    return child.stderr.splitlines()[-1]


def test_a_kernel_that_does_not_load_stops_the_start(shared_hub, model_folder, tmp_path):
    said = failed_start(offline(shared_hub, tmp_path), model_folder)
    assert said.startswith(f"serve: {REPO} does not load: ") and "--eager" in said


def test_a_model_that_the_kernel_is_not_for_stops_the_start(shared_hub, kernel_home, silu_model_folder):
    """Its blocks have all the parts and get the layer's forward, which keeps their own arithmetic."""
    said = failed_start(offline(shared_hub, kernel_home), silu_model_folder)
    assert f"none of the {LAYERS} gated blocks of LlamaForCausalLM runs on {REPO}" in said and "SiLU" in said


def test_a_model_that_is_not_there_stops_the_start(shared_hub, tmp_path):
    said = failed_start(offline(shared_hub, tmp_path), tmp_path / "nothing")
    assert said.startswith(f"serve: {tmp_path / 'nothing'} does not load on cpu: ")


def test_the_example_has_the_versions_that_are_tested():
    """The projects' own pins hold for the packages that both name."""
    tested = {}
    for name in ("requirements.txt", "requirements-test.txt"):
        tested |= pins((package.ROOT / name).read_text())
    example = pins((EXAMPLE / "requirements.txt").read_text())
    assert len(example) == 8
    assert {name: tested[name] for name in example} == example


def pins(text: str) -> dict[str, str]:
    """The exact versions in a requirements file; of those for several Pythons, the newest's."""
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", text, re.MULTILINE))
