"""A run's kernels, compiled for its GPU while data and weights are prepared.

Which they are is known from the fake GPU on which a run's memory is counted: steps launch there what they will launch.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import genesis
from genesis import cuda
from genesis.backend import CPU, Device
from genesis.backend.cuda import backend_of
from genesis.backend.cuda.compilations import is_compiling
from genesis.backend.cuda.launch import compile_ahead
from genesis.backend.cuda.simulated.fake import counting_device, told
from genesis.errors import GenesisError
from genesis.train.config import Config
from genesis_cli.session.settings import sample_drawing
from genesis_cli.session.trained_parameters import select_trained
from genesis_models.config import ModelConfig
from genesis_models.engine import Request
from genesis_models.generate import engine_for
from genesis_models.registry import empty_model

CHARACTERS = 4  # of a prompt's token, about
TOKENS = 4  # of a sample that are drawn: the first, those of steps before they are captured, and one after it


@contextmanager
def compiled_ahead(device: Device) -> Iterator[None]:
    """Inside the block, what is launched on the fake GPU like `device` begins to be compiled for `device`: for a run
    that goes on, as a process ends when all is compiled.
    """
    driver = None if device == CPU else backend_of(device).driver
    if driver is None or driver.prepare is not None:  # nothing is compiled there
        yield
        return
    with told(cuda.get_device_properties(device), functools.partial(compile_ahead, driver)):
        yield


def compile_samples(config: Config, shape: ModelConfig, device: Device) -> None:
    """Begin to compile the kernels of a run's samples, where those of its steps were not all in the cache."""
    if device != CPU and config.eval.prompts and is_compiling():
        # What is wrong with a prompt is said when it is drawn from.
        with compiled_ahead(device), suppress(GenesisError):
            draw_samples(config, shape, counting_device(cuda.get_device_properties(device)))


def draw_samples(config: Config, shape: ModelConfig, fake: Device) -> None:
    """Draw the first tokens of a run's samples on a fake GPU, from prompts of about its prompts' lengths."""
    settings = config.eval
    sampling = sample_drawing(config)
    with cuda.device(fake), genesis.no_grad():
        model = empty_model(shape, device=str(fake), dtype=config.model.dtype)
        select_trained(config, model)
        model.eval()
        requests = [
            Request([0] * max(1, len(prompt) // CHARACTERS), sampling, settings.sample_tokens, sequence=number)
            for number, prompt in enumerate(settings.prompts)
        ]
        tokens = engine_for(model, requests).run(iter(requests))
        for _ in itertools.islice(tokens, TOKENS * len(requests)):
            pass
