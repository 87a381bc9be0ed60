"""A small OpenAI-compatible server that answers as a test likes, with vLLM's counters beside it.

It runs in a thread of the test, or as `python -m tests.fake_openai --port 8000` where a command has
to start it. What it counts as decode time is made up, so that figures from the counters are exact.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import uvicorn
from specdec_exporter.model import Counters
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests import pages

CUT = "cut"
"""The connection breaks here."""
STEP_SECONDS = 0.010
"""Of a step without drafts; each drafted token adds a fifth."""

Event = Mapping[str, Any] | float | str
"""What is sent, or how long to wait, or `CUT`."""
Answer = Callable[[dict[str, Any]], Iterable[Event] | Response]


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def finish(reason: str = "stop", **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def usage(completion: int, prompt: int = 20, **fields: Any) -> dict[str, Any]:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"choices": [], "usage": told, **fields}


def saying(text: str, tokens: int = 9, reason: str = "stop") -> list[Event]:
    """A usual stream: a first event with the role alone, fragments, the reason, the usage."""
    middle = len(text) // 2
    return [
        delta(role="assistant", content=""),
        delta(content=text[:middle]),
        0.002,
        delta(content=text[middle:]),
        finish(reason),
        usage(tokens),
    ]


def says(text: str, tokens: int = 9) -> Answer:
    return lambda _: saying(text, tokens)


def refuses(status: int, message: str) -> Answer:
    return lambda _: JSONResponse({"error": {"message": message}}, status_code=status)


class FakeServer:
    """Answers on 127.0.0.1; `answer` may be exchanged while it runs.

    Args:
        answer: to the body of a request.
        k: tokens that it pretends to draft; one of them is always accepted.
        port: 0 takes a free one.
        metrics: whether it has a metrics page.
    """

    def __init__(self, answer: Answer, *, k: int = 0, port: int = 0, metrics: bool = True) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.others = 0
        """Requests of somebody else, to be counted with ours."""
        self.hits = 0
        """Prompt tokens found in a cache, so far."""
        self.flags = {"enable_prefix_caching": "True"}
        self._k = k
        self._port = port
        self._metrics = metrics
        self._tokens: list[int] = []
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/metrics", self._page),
            Route("/version", lambda _: JSONResponse({"version": "0.32.0"})),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            port=port,
            log_config=None,
            log_level="critical",
            lifespan="off",
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def prompts(self) -> list[str]:
        """The first message of each request."""
        return [body["messages"][0]["content"] for body in self.bodies]

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def leave(self) -> None:
        """Take no further connection, as of now; to be called from an answer."""
        for server in self._server.servers:
            server.close()

    def stop(self) -> None:
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()

    def run(self) -> None:
        """Serve in this thread, until a signal comes."""
        self._server.run()

    def counters(self) -> Counters:
        tokens = [*self._tokens, *[9] * self.others]
        decoded = sum(tokens) - len(tokens)
        steps = decoded / 2 if self._k else decoded
        return Counters(
            drafts=steps if self._k else None,
            draft_tokens=steps * self._k if self._k else None,
            accepted_tokens=steps if self._k else None,
            accepted_per_position=(steps, *[0.0] * (self._k - 1)) if self._k else (),
            generation_tokens=sum(tokens),
            first_tokens=len(tokens),
            decode_seconds=steps * STEP_SECONDS * (1 + self._k / 5),
            decode_steps=steps,
        )

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def _page(self, _: Request) -> Response:
        if not self._metrics:
            return PlainTextResponse("no", status_code=404)
        labels = 'engine="0",model_name="m"'
        flags = ",".join(f'{name}="{value}"' for name, value in self.flags.items())
        lines = [
            *pages.lines(self.counters()),
            f"vllm:prefix_cache_queries_total{{{labels}}} {20 * len(self.bodies)}",
            f"vllm:prefix_cache_hits_total{{{labels}}} {self.hits}",
            f"vllm:num_requests_running{{{labels}}} 0",
            f'vllm:cache_config_info{{{flags},engine="0",num_gpu_blocks="7"}} 1',
        ]
        return PlainTextResponse("".join(f"{line}\n" for line in lines))

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        answer = self.answer(body)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._events(answer), media_type="text/event-stream")

    async def _events(self, events: Iterable[Event]) -> AsyncIterator[bytes]:
        for event in events:
            if event == CUT:
                raise ConnectionResetError
            if isinstance(event, str):
                yield event.encode()
            elif isinstance(event, float):
                await asyncio.sleep(event)
            else:
                assert not isinstance(event, int)
                if told := event.get("usage"):
                    self._tokens.append(told["completion_tokens"])
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        yield b"data: [DONE]\n\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--speculative-config", type=json.loads, default={})
    options = parser.parse_args(arguments)
    k = options.speculative_config.get("num_speculative_tokens", 0)
    FakeServer(says("ok"), k=k, port=options.port).run()


if __name__ == "__main__":
    main()
