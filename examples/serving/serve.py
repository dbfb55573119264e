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


class KernelError(Exception):
    """The kernel cannot be put into the model; the message says why."""


def gated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that the layer can stand in for. It keeps the forward of those whose activation is no GELU."""
    return [module for module in model.modules() if all(hasattr(module, part) for part in PARTS)]


def put_into(model: nn.Module, kernel: str, version: int) -> dict[str, object]:
    """Gives every gated block of a model the kernel's forward; returns what /health reports.

    Raises KernelError if the kernel cannot be loaded or the model has no such block.
    """
    blocks = gated_blocks(model)
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
    homes = [getattr(block.forward, "__func__", block.forward).__module__ for block in blocks]
    builds = {home.partition(".")[0] for home in homes if "_geglu_" in home}
    if len(builds) != 1 or any("_geglu_" not in home for home in homes):
        raise KernelError(f"of {len(blocks)} blocks only some run on the kernel: {sorted(set(homes))}")
    return {"repository": kernel, "version": None if local else version, "build": builds.pop(), "layers": len(blocks)}


class KernelizedModels(ModelManager):
    """Loads models as transformers' server does, and puts the kernel into each."""

    def __init__(self, kernel: str | None, version: int, **options):
        self.kernel, self.version, self.report = kernel, version, None
        super().__init__(**options)

    def _load_model(self, *arguments, **options):
        model = super()._load_model(*arguments, **options)
        if self.kernel is not None:
            self.report = put_into(model, self.kernel, self.version)
        return model


def make_app(models: KernelizedModels, continuous_batching: bool):
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
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) != "/health"]

    @app.get("/health")
    def health():
        alive = state.is_cb_alive()
        content = {"status": "ok" if alive else "unhealthy", "kernel": models.report}
        return JSONResponse(content, status_code=200 if alive else 503)

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
    app = make_app(models, options.continuous_batching)
    uvicorn.run(app, host=options.host, port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
