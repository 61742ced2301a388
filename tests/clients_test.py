#!/usr/bin/env python3
"""Tests flatkv serve with common clients: openai, anthropic and langchain-openai.

usage: clients_test.py <flatkv> [test...]     requires a Python with these packages; scripts/test creates one
"""
import anthropic
import openai
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

from serve_test import BOOK, KEYS, run, serving

SETTINGS = {"max_tokens": 16, "temperature": 0}


def address(server):
    return f"http://127.0.0.1:{server.port}"


def openai_chat_streams_and_reports_errors():
    with serving("-c", "8K", "--api-key", KEYS[0]) as server:
        client = openai.OpenAI(base_url=address(server) + "/v1", api_key=KEYS[0], max_retries=0)
        ask = {"model": "any", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": BOOK[:300]}], **SETTINGS}
        whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content
        assert text and len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens, whole
        chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text, chunks
        assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 256, chunks[-1]
        assert client.completions.create(model="any", prompt=BOOK[:100], **SETTINGS).choices[0].text
        assert [m.id for m in client.models.list()] == ["needle"]
        for wrong, error in (({"temperature": -1}, openai.BadRequestError), ({"max_tokens": 10 ** 6}, openai.BadRequestError)):
            try:
                client.chat.completions.create(**{**ask, **wrong})
                raise AssertionError(wrong)
            except error as e:
                assert e.body["type"] == "invalid_request_error", e
        try:
            openai.OpenAI(base_url=address(server) + "/v1", api_key="wrong-key", max_retries=0).models.list()
            raise AssertionError("a wrong key was accepted")
        except openai.AuthenticationError:
            pass


def openai_responses_stream_and_report_errors():
    with serving("-c", "8K") as server:
        client = openai.OpenAI(base_url=address(server) + "/v1", api_key="none", max_retries=0)
        ask = {"model": "any", "instructions": "x", "input": BOOK[:300], "max_output_tokens": 16, "temperature": 0}
        whole = client.responses.create(**ask)
        assert len(whole.output_text) == 16 and whole.status == "incomplete" and whole.usage.input_tokens == 302, whole
        with client.responses.stream(**ask) as stream:
            text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == whole.output_text, (text, whole)
        items = [{"role": "user", "content": BOOK[:300]}, *whole.output, {"role": "user", "content": "y"}]
        again = client.responses.create(**{**ask, "input": items})
        assert again.usage.input_tokens_details.cached_tokens == 256 and again.output_text, again
        for kept in ({"previous_response_id": whole.id}, {"background": True}):
            try:
                client.responses.create(**ask, **kept)
                raise AssertionError(kept)
            except openai.BadRequestError as e:
                assert e.body["param"] in kept, e


def anthropic_streams_and_counts_tokens():
    with serving("-c", "8K", "--api-key", KEYS[0]) as server:
        client = anthropic.Anthropic(base_url=address(server), api_key=KEYS[0], max_retries=0)
        ask = {"model": "any", "system": "x", "messages": [{"role": "user", "content": BOOK[:300]}]}
        new = {"max_tokens": 16, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**ask, **new)
        assert whole.usage.input_tokens == client.messages.count_tokens(**ask).input_tokens == 302, whole
        with client.messages.stream(**ask, **new) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == whole.content[0].text and last.stop_reason == whole.stop_reason, (text, whole)
        assert last.usage.cache_read_input_tokens == 256, last
        try:
            client.messages.create(**{**ask, "messages": [{"role": "unknown", "content": "x"}]}, **new)
            raise AssertionError("an unknown role was accepted")
        except anthropic.BadRequestError as e:
            assert e.body["error"]["type"] == "invalid_request_error", e


def langchain_invokes_streams_and_batches():
    with serving("-c", "8K") as server:
        model = ChatOpenAI(base_url=address(server) + "/v1", api_key="none", model="any", max_retries=0, stream_usage=True, **SETTINGS)
        messages = [SystemMessage("x"), HumanMessage(BOOK[:300])]
        whole = model.invoke(messages)
        assert whole.content and whole.usage_metadata["input_tokens"] == 302, whole
        chunks = list(model.stream(messages))
        assert "".join(c.content for c in chunks) == whole.content, chunks
        used = [c.usage_metadata for c in chunks if c.usage_metadata]
        assert used[-1]["input_token_details"]["cache_read"] == 256, used
        answers = model.batch([[HumanMessage(BOOK[i * 50:i * 50 + 200])] for i in range(6)])
        assert len(answers) == 6 and all(a.usage_metadata["output_tokens"] > 0 for a in answers), answers


if __name__ == "__main__":
    run([openai_chat_streams_and_reports_errors, openai_responses_stream_and_report_errors, anthropic_streams_and_counts_tokens, langchain_invokes_streams_and_batches])
