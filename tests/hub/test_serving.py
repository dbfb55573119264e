"""The example server: started offline on a pre-downloaded kernel, asked by many at once, compared with eager."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import package
import pytest
import torch
from users import REPO, child_environment

pytest.importorskip("fastapi")
SERVER = package.ROOT / "examples" / "serving" / "serve.py"
WORDS = [f"w{index}" for index in range(120)]
NEW_TOKENS = 8
LAYERS = 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A tiny Gemma 3 with random weights, and a tokenizer of 120 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

    vocabulary = {name: index for index, name in enumerate(["<pad>", "<eos>", "<bos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("model")
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def kernel_home(shared_hub, tmp_path_factory):
    """A cache with the kernel in it, as the Dockerfile makes one."""
    from pathlib import Path

    home = tmp_path_factory.mktemp("image")
    program = Path(sys.executable).with_name("hf")
    arguments = ("download", REPO, "--repo-type", "kernel", "--revision", "v1")
    subprocess.run([program, *arguments], env=child_environment(shared_hub, home), check=True, capture_output=True)
    return home


@contextmanager
def server(hub, home, folder, *arguments):
    """The address of a server that is ready; it is terminated at the end, and must then end by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = child_environment(hub, home, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    command = [sys.executable, str(SERVER), str(folder), "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    child = subprocess.Popen([*command, *arguments], env=environment, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if child.poll() is not None:
                raise AssertionError(child.stderr.read())
            try:
                get(f"{url}/health")
                break
            except urllib.error.URLError:
                time.sleep(0.1)
        yield url
    finally:
        child.terminate()
        child.communicate(timeout=30)
    assert child.returncode in (0, -15)


def get(url: str):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def complete(url: str, folder, prompt: object) -> str:
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]


def eager_answers(folder, prompts) -> list[str]:
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = Gemma3ForCausalLM.from_pretrained(folder).eval()
    answers = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers.append(tokenizer.decode(out[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_concurrent_requests_get_eagers_answers(shared_hub, kernel_home, model_folder):
    prompts = [" ".join(WORDS[start : start + 3 + start % 5]) for start in range(0, 80, 5)]
    expected = eager_answers(model_folder, prompts)
    assert len(set(expected)) > 4  # a model that always says the same would prove nothing
    with server(shared_hub, kernel_home, model_folder) as url:
        health = get(f"{url}/health")
        assert health["status"] == "ok"
        assert health["kernel"]["repository"] == REPO and health["kernel"]["version"] == 1
        assert health["kernel"]["layers"] == LAYERS and health["kernel"]["build"].startswith("_geglu_cpu_")
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda prompt: complete(url, model_folder, prompt), prompts))
        assert answers == expected
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(url, model_folder, ["not", "a", "string"])
        assert 400 <= refused.value.code < 500
        assert complete(url, model_folder, prompts[0]) == expected[0]


def failed_start(hub, home, folder, *arguments) -> str:
    environment = child_environment(hub, home, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    command = [sys.executable, str(SERVER), str(folder), "--device", "cpu", *arguments]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert child.returncode == 1
    return child.stderr.splitlines()[-1]


def test_a_kernel_that_does_not_load_stops_the_start(shared_hub, model_folder, tmp_path):
    said = failed_start(shared_hub, tmp_path / "empty", model_folder)
    assert said.startswith(f"serve: {REPO} does not load") and "--eager" in said


def test_eager_on_request(shared_hub, model_folder, tmp_path):
    with server(shared_hub, tmp_path / "empty", model_folder, "--eager") as url:
        assert get(f"{url}/health") == {"status": "ok", "kernel": None}
