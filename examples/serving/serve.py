"""transformers' own inference server with the kernel in every GELU-gated MLP of the model.

    python serve.py google/gemma-3-1b-it --kernel org/geglu --version 1

The kernel is loaded and put into the model before the first request is taken: a server that cannot have it does not
start, unless --eager says that it may do without. GET /health tells which build runs and in how many layers.
Endpoints, batching and streaming are transformers'; written for transformers 5.22.
"""

import argparse
import sys
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from kernels import (
    LayerRepository,
    LocalLayerRepository,
    Mode,
    kernelize,
    replace_kernel_forward_from_hub,
    use_kernel_mapping,
)
from kernels.layer import KernelizeFallback
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ContinuousBatchingConfig
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.response import ResponseHandler
from transformers.cli.serving.server import build_server
from transformers.cli.serving.systemone import SystemOneHandler
from transformers.cli.serving.transcription import TranscriptionHandler
from transformers.cli.serving.utils import GenerationState

LAYER = "GeGLUMLP"
PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")
# transformers' /health, which knows no kernel, and the routes that would unload the one model or load more.
LEFT_OUT = {"/health", "/load_model", "/reset"}


class KernelError(Exception):
    """The kernel cannot be put into the model; the message says why."""


class CalledLibraries(TorchDispatchMode):
    """Collects the namespaces of all operators that are called: a kernel's is the id of its build."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.namespace)
        return func(*args, **(kwargs or {}))


def called_by(block: nn.Module, dtype: torch.dtype) -> set[str]:
    """What a block's forward really calls. A layer keeps the host's arithmetic where it is not the one it fuses."""
    device = next(block.parameters()).device
    with torch.inference_mode(), CalledLibraries() as called:
        block(torch.zeros(1, 1, block.gate_proj.in_features, dtype=dtype, device=device))
    return called.names


def put_into(model: nn.Module, kernel: str, version: int) -> dict[str, object]:
    """Puts the kernel into every gated block of a model and tries each; returns what /health reports.

    Raises KernelError if the kernel cannot be loaded or no block runs on it.
    """
    blocks = [module for module in model.modules() if all(hasattr(module, part) for part in PARTS)]
    if not blocks:
        raise KernelError(f"{type(model).__name__} has no block with {', '.join(PARTS)}")
    for kind in {type(block) for block in blocks}:
        replace_kernel_forward_from_hub(kind, LAYER)
    local = Path(kernel).is_dir()
    layer = (
        LocalLayerRepository(Path(kernel), layer_name=LAYER)
        if local
        else LayerRepository(kernel, layer_name=LAYER, version=version)
    )
    # Only other layers and devices may fall back: a kernel that does not load is an error here.
    fallback = KernelizeFallback.NO_LAYER | KernelizeFallback.NO_DEVICE
    try:
        with use_kernel_mapping({LAYER: {model.device.type: layer}}, inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE, device=model.device, use_fallback=fallback)
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise KernelError(f"{kernel} does not load: {error}") from error
    # The package of every layer is named by the id of its build, as its operators' namespace is.
    build = getattr(blocks[0].forward, "__func__", blocks[0].forward).__module__.partition(".")[0]
    layers = sum(build in called_by(block, model.dtype) for block in blocks)
    if not layers:
        raise KernelError(
            f"none of the {len(blocks)} gated blocks of {type(model).__name__} runs on {kernel}, "
            f"which is for GELU: the first has {blocks[0].act_fn}"
        )
    shown = None if local else version
    return {"repository": kernel, "version": shown, "build": build, "layers": layers, "of": len(blocks)}


class KernelizedModels(ModelManager):
    """Loads a model as transformers' server does, and puts the kernel into it."""

    def __init__(self, kernel: str | None, version: int, **options):
        self.kernel, self.version, self.report = kernel, version, None
        super().__init__(**options)

    def _load_model(self, *arguments, **options):
        model = super()._load_model(*arguments, **options)
        if self.kernel is not None:
            self.report = put_into(model, self.kernel, self.version)
        return model


def make_app(models: KernelizedModels, continuous_batching: bool) -> FastAPI:
    """transformers' application, with a /health of our own."""
    config = ContinuousBatchingConfig() if continuous_batching else None
    state = GenerationState(continuous_batching=continuous_batching, cb_config=config)
    handlers = {"model_manager": models, "generation_state": state}
    app = build_server(
        models,
        ChatCompletionHandler(**handlers),
        completion_handler=CompletionHandler(**handlers),
        response_handler=ResponseHandler(**handlers),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(**handlers),
        generation_state=state,
    )
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) not in LEFT_OUT]

    @app.get("/health")
    def health():
        alive = state.is_cb_alive()
        content = {"status": "ok" if alive else "unhealthy", "kernel": models.report}
        return JSONResponse(content, status_code=200 if alive else 503)

    @app.exception_handler(ValueError)
    async def refuse(request: Request, error: ValueError):
        """What transformers says of a parameter is for the one who sent it: without this it is a bare 500."""
        return JSONResponse({"detail": str(error)}, status_code=400)

    return app


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve a model with the GeGLU kernel.")
    parser.add_argument("model", help="a model's repository or folder")
    parser.add_argument("--kernel", default="org/geglu", help="kernel repository, or a folder with build/ in it")
    parser.add_argument("--version", type=int, default=1, help="version of the kernel repository")
    parser.add_argument("--eager", action="store_true", help="serve without the kernel")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--continuous-batching", action="store_true")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    kernel = None if options.eager else options.kernel
    try:
        models = KernelizedModels(kernel, options.version, device=options.device, force_model=options.model)
    except KernelError as error:
        print(f"serve: {error} (--eager serves without the kernel)", file=sys.stderr)
        return 1
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # torch asserts that it has the device
        print(f"serve: {options.model} does not load on {options.device}: {error}", file=sys.stderr)
        return 1
    app = make_app(models, options.continuous_batching)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
