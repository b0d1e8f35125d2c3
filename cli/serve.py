"""`genesis serve`: serves a model over OpenAI's HTTP interface on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from genesis.errors import ModelError
from genesis.files.boundary import fitting
from genesis_cli.options import Base, Device, Dtype, Folder, KvCache, kv_cache_type, settings, weight_dtype


def serve(
    folder: Folder,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="N", min=0, max=65535, help="0 picks a free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            envvar="GENESIS_API_KEY",
            show_envvar=True,
            help="Key that clients must send; required beyond loopback.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name of the model for clients.  [default: the folder's name]"),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="N", min=2, help="Most tokens of a sequence.  [default: the model's, at most 4096]"
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option("--queue", metavar="N", min=1, help="Most running and waiting requests; others get 429.")
    ] = 512,
    most_bytes: Annotated[int, typer.Option("--max-body", metavar="BYTES", min=1024, help="Largest request body.")] = 4
    << 20,
    base: Base = None,
    device: Device = None,
    dtype: Dtype = None,
    kv_cache: KvCache = "auto",
) -> None:
    """Serve a model to OpenAI clients over HTTP.

    It answers completions and chats, streamed or whole. It listens on this machine only, unless --host names another
    address. Ctrl-C and SIGTERM end it once pending answers are complete, at the latest after 8 s.
    """
    from genesis.train.signals import Interrupts

    with Interrupts(saves=False), fitting(ModelError, "running the model", folder):
        from genesis.train.config import TrainConfig
        from genesis_cli.session.serving.process import serve as run_server

        run = settings(TrainConfig, device=("--device", device))
        kind, cache = weight_dtype(dtype, quantized=True), kv_cache_type(kv_cache)
        run_server(
            folder,
            host=host,
            port=port,
            api_key=api_key,
            name=name,
            context=context,
            queue=queue,
            most_bytes=most_bytes,
            base=base,
            **run,
            dtype=kind,
            kv_cache=cache,
        )
