"""The `openai` client against `genesis serve`: chat, completions, streams, log-probabilities, errors, clients that go.

    .venv-peers/bin/python -m tests.peers.openai_client

A tiny model on the CPU. Each function below is one call or a few that belong together, and checks what comes back.
Needs an environment with Genesis and openai (`make peers`), so it is no part of `make test`; `make peers-test` runs it.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai

import genesis_models
from genesis.data.tokenizer import Tokenizer
from tests.cli.chat_model import write_legible_model
from tests.serving.server import serving

CALLS: list[Callable[[openai.OpenAI], None]] = []
PROMPT = "some"  # after which the model writes several characters, greedily
CHAT: list[Any] = [{"role": "system", "content": "some words"}, {"role": "user", "content": "words to learn?"}]
KEY = "a-key"
NEW = 12
expected_text = ""  # what the engine itself continues PROMPT with, greedily; `main` sets it


def call(function: Callable[[openai.OpenAI], None]) -> Callable[[openai.OpenAI], None]:
    """Registers a function that calls the server."""
    CALLS.append(function)
    return function


def refused(kind: type[openai.APIStatusError], ask: Callable[[], Any]) -> openai.APIStatusError:
    """The error that a call must raise."""
    try:
        ask()
    except kind as error:
        found = error
    else:
        raise AssertionError("the call is answered")
    assert found.body is not None and found.message
    return found


def chat(client: openai.OpenAI, **how: Any) -> Any:
    return client.chat.completions.create(**{"model": "model", "messages": CHAT, "max_tokens": NEW, **how})


def complete(client: openai.OpenAI, **how: Any) -> Any:
    asked = {"model": "model", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    return client.completions.create(**{**asked, **how})


# --- Models -----------------------------------------------------------------------------------------------------------


@call
def models_are_listed(client: openai.OpenAI) -> None:
    [card] = client.models.list().data
    assert (card.id, card.object, card.owned_by) == ("model", "model", "genesis")
    assert abs(card.created - time.time()) < 600


@call
def a_model_is_retrieved(client: openai.OpenAI) -> None:
    assert client.models.retrieve("model") == client.models.list().data[0]


@call
def an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    assert refused(openai.NotFoundError, lambda: client.models.retrieve("org/other")).code == "model_not_found"


# --- Completions ------------------------------------------------------------------------------------------------------


@call
def a_text_is_continued_as_by_the_engine(client: openai.OpenAI) -> None:
    found = complete(client)
    assert found.object == "text_completion" and found.choices[0].text == expected_text
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == NEW


@call
def sixteen_tokens_are_the_default(client: openai.OpenAI) -> None:
    assert client.completions.create(model="model", prompt="words").usage.completion_tokens <= 16


@call
def prompts_are_answered_in_order(client: openai.OpenAI) -> None:
    found = complete(client, prompt=["words", PROMPT, "to learn"]).choices
    assert [each.index for each in found] == [0, 1, 2] and found[1].text == expected_text


@call
def a_prompt_may_be_ids(client: openai.OpenAI) -> None:
    one, other = complete(client, prompt=[3, 4, 5]), complete(client, prompt=[[3, 4, 5], [6]])
    assert one.choices[0].text == other.choices[0].text and one.usage.prompt_tokens == 3


@call
def a_seed_repeats_a_text(client: openai.OpenAI) -> None:
    texts = [complete(client, temperature=1.3, seed=seed).choices[0].text for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


@call
def n_texts_differ(client: openai.OpenAI) -> None:
    found = complete(client, temperature=1.5, n=4, seed=1).choices
    assert len({each.text for each in found}) == 4 and [each.index for each in found] == [0, 1, 2, 3]


@call
def the_likeliest_tokens_alone_are_greedy(client: openai.OpenAI) -> None:
    narrow = {"top_k": 1, "repetition_penalty": 1.0}  # which OpenAI's own server does not take
    assert complete(client, temperature=1.0, extra_body=narrow).choices[0].text == expected_text
    assert complete(client, temperature=1.0, top_p=1e-6).choices[0].text == expected_text


@call
def a_stop_string_ends_a_text(client: openai.OpenAI) -> None:
    found = complete(client, stop=expected_text[4]).choices[0]
    assert found.text == expected_text[: expected_text.index(expected_text[4])] and found.finish_reason == "stop"


@call
def the_first_of_several_stops_counts(client: openai.OpenAI) -> None:
    found = complete(client, stop=["never", expected_text[6], expected_text[3]]).choices[0]
    first = min(expected_text.index(expected_text[at]) for at in (3, 6))
    assert found.text == expected_text[:first]


@call
def log_probabilities_of_drawn_tokens(client: openai.OpenAI) -> None:
    told = complete(client, logprobs=3).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == NEW
    assert "".join(told.tokens) == expected_text and all(each <= 0 for each in told.token_logprobs)
    for chance, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
        assert len(top) <= 3 and chance == max(top.values())  # the text is greedy


@call
def an_echo_gives_those_of_the_prompt(client: openai.OpenAI) -> None:
    found = complete(client, logprobs=1, echo=True, max_tokens=2).choices[0]
    drawn = complete(client, max_tokens=2).choices[0].text
    assert found.text == PROMPT + drawn and expected_text.startswith(drawn)
    told = found.logprobs
    assert told.token_logprobs[0] is None and all(each <= 0 for each in told.token_logprobs[1:])
    begin = told.text_offset.index(len(PROMPT))  # as clients look for the first token that was drawn
    assert len(told.tokens[begin:]) == 2 and "".join(told.tokens[begin:]) == drawn
    for at, text in zip(told.text_offset[1:], told.tokens[1:], strict=True):  # the first is the model's, and no text
        assert found.text[at:].startswith(text)


@call
def an_echo_alone_draws_nothing(client: openai.OpenAI) -> None:
    found = complete(client, echo=True, max_tokens=0, logprobs=0)
    assert found.choices[0].text == PROMPT and found.usage.completion_tokens == 0
    both = complete(client, echo=True, max_tokens=1, logprobs=0).choices[0].logprobs.token_logprobs
    assert both[:-1] == found.choices[0].logprobs.token_logprobs


@call
def a_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    parts = [chunk.choices[0] for chunk in complete(client, stream=True)]
    assert "".join(each.text for each in parts) == expected_text
    assert [each.finish_reason for each in parts if each.finish_reason] == ["length"]


@call
def several_texts_stream_together(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"prompt": ["words", "to"], "n": 2, "temperature": 1.0, "seed": 3}
    texts = [""] * 4
    for chunk in complete(client, **how, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [each.text for each in complete(client, **how).choices]


# --- Chat -------------------------------------------------------------------------------------------------------------


@call
def a_chat_is_answered(client: openai.OpenAI) -> None:
    found = chat(client)
    assert found.object == "chat.completion" and found.choices[0].message.role == "assistant"
    assert found.usage.total_tokens == found.usage.prompt_tokens + found.usage.completion_tokens <= 128


@call
def the_newer_name_of_max_tokens(client: openai.OpenAI) -> None:
    found = client.chat.completions.create(model="model", messages=CHAT, max_completion_tokens=5, temperature=0)
    assert found.choices[0].message.content == chat(client, max_tokens=5, temperature=0).choices[0].message.content
    assert found.usage is not None and found.usage.completion_tokens <= 5


@call
def content_in_parts_is_the_same_text(client: openai.OpenAI) -> None:
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in CHAT]
    texts = [chat(client, messages=each, temperature=0).choices[0].message.content for each in (CHAT, parts)]
    assert texts[0] == texts[1]


@call
def a_longer_conversation(client: openai.OpenAI) -> None:
    said: list[Any] = [*CHAT, {"role": "assistant", "content": "some"}, {"role": "user", "content": "more"}]
    assert chat(client, messages=said).usage.prompt_tokens > chat(client).usage.prompt_tokens


@call
def answers_of_a_chat(client: openai.OpenAI) -> None:
    found = chat(client, n=3, temperature=1.4, seed=-5)
    assert len({each.message.content for each in found.choices}) == 3
    assert chat(client, n=3, temperature=1.4, seed=-5).choices == found.choices


@call
def log_probabilities_of_a_chat(client: openai.OpenAI) -> None:
    found = chat(client, logprobs=True, top_logprobs=2, temperature=0).choices[0].logprobs.content
    assert len(found) == NEW
    for each in found:
        assert each.top_logprobs[0].token == each.token and each.logprob == each.top_logprobs[0].logprob
        assert each.top_logprobs[1].logprob <= each.logprob <= 0 and each.bytes is not None


@call
def a_streamed_chat_joins_to_the_whole(client: openai.OpenAI) -> None:
    chunks = [*chat(client, stream=True, seed=5, stream_options={"include_usage": True})]
    whole = chat(client, seed=5)
    assert chunks[0].choices[0].delta.role == "assistant" and len({each.id for each in chunks}) == 1
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole.choices[0].message.content
    assert not chunks[-1].choices and chunks[-1].usage == whole.usage


@call
def a_streamed_chat_stops(client: openai.OpenAI) -> None:
    text = chat(client, temperature=0).choices[0].message.content
    parts = [each.choices[0] for each in chat(client, temperature=0, stream=True, stop=[text[5]])]
    assert "".join(each.delta.content or "" for each in parts) == text[: text.index(text[5])]
    assert parts[-1].finish_reason == "stop"


@call
def the_clients_helper_of_streams(client: openai.OpenAI) -> None:
    text = chat(client, temperature=0).choices[0].message.content
    stop = text[3]  # the helper takes no answer that ends for its length
    asked: Any = {"model": "model", "messages": CHAT, "max_tokens": NEW, "temperature": 0, "stop": stop}
    with client.chat.completions.stream(**asked) as stream:
        stream.until_done()
        found = stream.get_final_completion().choices[0]
    assert found.message.content == text[: text.index(stop)]


# --- Clients that go, many at a time, and errors ----------------------------------------------------------------------


@call
def an_abandoned_stream_frees_its_place(client: openai.OpenAI) -> None:
    with complete(client, prompt=["words"] * 8, max_tokens=100, stream=True) as stream:
        next(iter(stream))
    health = str(client.base_url).replace("/v1/", "/health")
    headers = {"Authorization": f"Bearer {KEY}"}
    for _ in range(100):
        if httpx.get(health, headers=headers).json()["requests"] == 0:
            return
        time.sleep(0.05)
    raise AssertionError("the requests still run")


@call
def a_client_that_waits_no_longer(client: openai.OpenAI) -> None:
    impatient = client.with_options(timeout=0.02)
    try:
        complete(impatient, prompt=["words"] * 8, max_tokens=110)
    except openai.APITimeoutError:
        an_abandoned_stream_frees_its_place(client)
    else:
        raise AssertionError("880 tokens within 20 ms")


@call
def many_at_once_are_as_alone(client: openai.OpenAI) -> None:
    async def together() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY, max_retries=0) as many:
            asked: Any = {"model": "model", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
            found = await asyncio.gather(*(many.completions.create(**asked) for _ in range(40)))
        return [each.choices[0].text for each in found]

    assert asyncio.run(together()) == [expected_text] * 40


@call
def the_raw_answer_is_json(client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="model", prompt="words", max_tokens=2)
    assert raw.headers["content-type"] == "application/json" and raw.parse().choices[0].index == 0


@call
def another_model_is_not_found(client: openai.OpenAI) -> None:
    error = refused(openai.NotFoundError, lambda: chat(client, model="gpt-4o"))
    assert (error.code, error.param) == ("model_not_found", "model")


@call
def more_tokens_than_the_context_holds(client: openai.OpenAI) -> None:
    error = refused(openai.BadRequestError, lambda: complete(client, max_tokens=9999))
    assert error.code == "context_length_exceeded"


@call
def values_out_of_range(client: openai.OpenAI) -> None:
    for key, value in (("temperature", -1), ("top_p", 0), ("n", 0), ("logprobs", 99), ("seed", 1 << 70)):
        wrong = {key: value}
        assert refused(openai.BadRequestError, lambda how=wrong: complete(client, **how)).param == key


@call
def what_is_not_done_is_refused(client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for how in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}, {"frequency_penalty": 1.0}):
        assert refused(openai.BadRequestError, lambda how=how: chat(client, **how)).param == next(iter(how))


@call
def an_empty_conversation(client: openai.OpenAI) -> None:
    assert refused(openai.BadRequestError, lambda: chat(client, messages=[])).param == "messages"


@call
def another_key(client: openai.OpenAI) -> None:
    stranger = client.with_options(api_key="another")
    assert refused(openai.AuthenticationError, stranger.models.list).code == "invalid_api_key"


@call
def paths_that_are_not_served(client: openai.OpenAI) -> None:
    for ask in (client.embeddings, client.responses):
        try:
            ask.create(model="model", input="a")
        except openai.NotFoundError:
            continue
        raise AssertionError("the path is served")


def main() -> int:
    """Prints a line for each function; 1 where one fails."""
    global expected_text  # noqa: PLW0603
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        model = write_legible_model(Path(folder) / "model")
        loaded, tokenizer = genesis_models.load(model), Tokenizer.load(model)
        expected_text = loaded.generate(tokenizer.prompt(PROMPT), max_tokens=NEW).text
        with serving(model, "--device", "cpu", "--api-key", KEY) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)
            for function in CALLS:
                try:
                    function(client)
                except (AssertionError, openai.OpenAIError) as error:
                    failed += 1
                    print(f"FAILED {function.__name__}: {error!r}", flush=True)
                else:
                    print(f"ok     {function.__name__}", flush=True)
    print(f"{len(CALLS)} kinds of calls: {f'{failed} failed' if failed else 'all as expected'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
