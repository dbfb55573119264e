"""Which algorithm a product takes on a GPU: tuned, saved, loaded, shipped, or the heuristic's."""

import json

import pytest
import reference
import torch
from reference import ACTIVATIONS
from test_gpu import cuda  # noqa: F401  (cuda is a fixture)
from test_linear_gpu import ACTIVATION_CASES, problem, route

pytestmark = [pytest.mark.gpu, pytest.mark.native]


@ACTIVATION_CASES
def test_tune_keeps_the_numbers(kernel, cuda, activation):  # noqa: F811
    inputs = problem(1000, 520, 264)
    before = [t.clone() for t in inputs]
    found = kernel.tune(*inputs, activation=activation)
    assert found
    for tuned in found:
        assert tuned.problem and tuned.candidates >= 1 and 0 < tuned.best_us <= tuned.first_us
    assert all(torch.equal(now, then) for now, then in zip(inputs, before, strict=True))
    out = kernel.linear(*inputs, activation=activation)
    reference.assert_linear_is_accurate(out, *inputs, activation)


@ACTIVATION_CASES
def test_tune_for_training(kernel, cuda, activation):  # noqa: F811
    inputs = problem(1000, 528, 264)
    forward = kernel.tune(*inputs, activation=activation)
    leaves = [t.detach().requires_grad_() for t in inputs]
    step = kernel.tune(*leaves, activation=activation)
    assert len(step) > len(forward)
    assert all(leaf.grad is None for leaf in leaves)
    grad = torch.randn(1000, 528, device=cuda).bfloat16()
    ours = torch.autograd.grad(kernel.linear(*leaves, activation=activation), leaves, grad)
    for mine, truth in zip(ours, reference.linear_grads(grad, *inputs, activation), strict=True):
        assert (mine.double() - truth).abs().max() <= 8 * torch.finfo(torch.bfloat16).eps * truth.abs().max()


def test_save_and_load(kernel, cuda, tmp_path):  # noqa: F811
    inputs = problem(776, 392, 136)
    kernel.tune(*inputs, activation="gelu_tanh")
    expected = kernel.linear(*inputs, activation="gelu_tanh")
    path = tmp_path / "tuning.json"
    count = kernel.save_tuning(path)
    assert count >= 1
    loaded = kernel.load_tuning(path)
    assert loaded == (count, ())
    reference.assert_same_bits(kernel.linear(*inputs, activation="gelu_tanh"), expected)
    # Saving what was loaded is the same file.
    assert kernel.save_tuning(tmp_path / "again.json") == count
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())


def test_entries_of_another_gpu_or_library_are_refused(kernel, cuda, tmp_path):  # noqa: F811
    kernel.tune(*problem(776, 392, 144))
    path = tmp_path / "tuning.json"
    count = kernel.save_tuning(path)
    for field in ("device", "cublaslt"):
        content = json.loads(path.read_text())
        for entry in content["entries"]:
            entry[field] = "other"
        changed = tmp_path / f"{field}.json"
        changed.write_text(json.dumps(content))
        loaded = kernel.load_tuning(changed)
        assert loaded.taken == 0 and len(loaded.refused) == count
        assert all(field in reason for reason in loaded.refused)
    for damage in (lambda entry: entry.pop("algo"), lambda entry: entry.update(algo="0" * 7)):
        content = json.loads(path.read_text())
        damage(content["entries"][0])
        path.with_name("damaged.json").write_text(json.dumps(content))
        loaded = kernel.load_tuning(path.with_name("damaged.json"))
        assert loaded.taken == count - 1 and "algo" in loaded.refused[0]


def test_tune_during_capture_is_refused(kernel, cuda):  # noqa: F811
    inputs = problem(64, 128, 256)
    kernel.linear(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="captured"):
            kernel.tune(*inputs)
        out = kernel.linear(*inputs)
    graph.replay()
    torch.cuda.synchronize()
    reference.assert_linear_is_accurate(out, *inputs, None)


def test_nothing_to_tune_in_float64(kernel, cuda):  # noqa: F811
    assert kernel.tune(*problem(64, 128, 256, torch.float64)) == ()


# Rows, columns and depth of one product in cublaslt_defaults.h.
SHIPPED = 8192, 3072, 768


def test_the_choice_of_algorithm_is_told(ops, kernel, cuda):  # noqa: F811
    """The heuristic's, then the tuned one; and the shipped one where it was measured."""
    operands = problem(712, 392, 136)
    assert route(ops, *operands, None) == "cublaslt"
    kernel.tune(*operands)
    assert route(ops, *operands, None) == "cublaslt:tuned"
    assert route(ops, *operands, "gelu") == "cublaslt:tuned+pointwise"
    operands = problem(*SHIPPED)
    if route(ops, *operands, None) == "cublaslt":
        pytest.skip("no algorithm is shipped for this GPU and cuBLASLt")
    assert route(ops, *operands, None) == "cublaslt:shipped"
    for activation in ACTIVATIONS:
        reference.assert_linear_is_accurate(kernel.linear(*operands, activation=activation), *operands, activation)
