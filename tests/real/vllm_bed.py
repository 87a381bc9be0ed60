"""A real vLLM on the CPU for tests: find or build it, start a server, and have prompts for it.

`vllm_venv` gives the environment that `tests/vllm/install.sh` builds once. `VllmServer` is a
`vllm serve` of one of the tiny models in `tests/vllm/models`, alive inside a `with` block. Nothing
here knows the exporter or vLLM's metric names: a test compares the two.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import ascii_letters
from types import TracebackType
from typing import Any, Self

import httpx

BED = Path(__file__).resolve().parents[1] / "vllm"
MODELS = BED / "models"
MODEL_NAME = "tiny"
"""The `model_name` of every server here."""


class VllmUnavailableError(Exception):
    """There is no vLLM, and none could be installed; the message is one line that says why."""


class VllmServerError(Exception):
    """A server did not start; the message ends with the last lines of its log."""


def vllm_venv() -> Path:
    """The virtual environment that has vLLM, built by `tests/vllm/install.sh` if there is none yet.

    Building takes minutes and 3 GB; `TEST_VLLM_VENV` names one to use instead.

    Raises:
        VllmUnavailableError: it cannot be installed here.
    """
    built = subprocess.run([BED / "install.sh"], capture_output=True, text=True)
    if built.returncode != 0:
        raise VllmUnavailableError(_last_lines(built.stderr, 1))
    return Path(_last_lines(built.stdout, 1))


def _last_lines(text: str, count: int) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


HTTP = httpx.Client(timeout=60, trust_env=False)
"""One for all requests: each new one reads a hundred certificates first, in which time no thread here
can take the time of a token."""


def get(url: str, timeout: float = 10.0) -> str:
    """The body of a page; raises `httpx.HTTPError` where there is none."""
    return HTTP.get(url, timeout=timeout).raise_for_status().text


def serve_arguments(port: int) -> list[str]:
    """What every `vllm serve` here is told."""
    return [
        # All of the models share one tokenizer, stored once.
        "--tokenizer", str(MODELS / "llama-target"),
        "--served-model-name", MODEL_NAME,
        "--host", "127.0.0.1",
        "--port", str(port),
        # The weights are stored in half the bits and computed in full: bfloat16 on a CPU
        # without the instructions for it is slower.
        "--dtype", "float32",
        "--max-model-len", "1024",
        "--max-num-seqs", "8",
        "--max-num-batched-tokens", "1024",
        "--kv-cache-memory-bytes", "64M",
        "--enforce-eager",
        "--distributed-executor-backend", "uni",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


VARIABLES = {
    "PYTHONPATH": str(BED / "shim"),
    "VLLM_PLUGINS": "forkcpu,synthcpu",
    # On a CPU vLLM makes a worker process of its own out of the executor "uni" unless this is 0, and
    # the two wait for each other busily: with it a load takes half of the processor time.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # These models are too small to share out: threads would wait for each other, and numba's
    # do so busily, which makes n-gram drafts ten times slower on two cores.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    # Nothing of these servers may wait for, or talk to, another machine.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
"""Variables of the environment of every vLLM here."""


def environment() -> dict[str, str]:
    """The environment of every vLLM here: this one with those variables."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | VARIABLES


def ask(venv: Path, script: str, asked: Any) -> Any:
    """What a script in vLLM's environment answers, in one process, since vLLM takes long to load.

    The script finds JSON as `asked` and leaves JSON as `answers`.
    """
    done = subprocess.run(
        [
            *(venv / "bin" / "python", "-c"),
            "import json, sys\nasked = json.load(sys.stdin)\n"
            f'{script}\nprint("ANSWERS", json.dumps(answers))',
        ],
        input=json.dumps(asked),
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, _last_lines(done.stderr, 40)
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("ANSWERS "))
    return json.loads(line.removeprefix("ANSWERS "))


class VllmServer:
    """A `vllm serve` on the loopback interface, alive inside a `with` block.

    Args:
        venv: an environment with vLLM, as `vllm_venv` gives it.
        model: the name of a folder of `tests/vllm/models`.
        port: where to listen; 0 picks a free port.
        speculative_config: what `--speculative-config` gets; a `model` in it is the name of a
            folder, too. None is no speculation.
        extra_args: further arguments of `vllm serve`.
        log: where its output goes.
        start_timeout: seconds that it may take until `/health` answers.
    """

    def __init__(
        self,
        venv: Path,
        model: str,
        *,
        log: Path,
        port: int = 0,
        speculative_config: Mapping[str, Any] | None = None,
        extra_args: Sequence[str] = (),
        start_timeout: float = 300.0,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.start_timeout = start_timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            str(venv / "bin" / "vllm"), "serve", str(MODELS / model), *serve_arguments(self.port),
        ]  # fmt: skip
        if speculative_config is not None:
            config = dict(speculative_config)
            if "model" in config:
                config["model"] = str(MODELS / config["model"])
            self._command += ["--speculative-config", json.dumps(config)]
        self._command += extra_args

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
        try:
            self._wait_for_health(self._process)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _wait_for_health(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.start_timeout
        while True:
            if (status := process.poll()) is not None:
                what = f"vllm serve ended with status {status} before it was healthy"
            elif time.monotonic() > deadline:
                what = f"vllm serve was not healthy within {self.start_timeout:.0f} s"
            else:
                try:
                    get(f"{self.url}/health", timeout=2.0)
                except httpx.HTTPError:
                    time.sleep(0.1)
                    continue
                return
            raise VllmServerError(f"{what}; its log ends:\n{self.log_tail()}")

    def stop(self) -> None:
        """End the server and every process it has started; does nothing the second time."""
        process, self._process = self._process, None
        if process is None:
            return
        # The engines of a data-parallel server outlive a server that is only terminated itself.
        for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(process.pid, sign)
                process.wait(timeout=patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        process.wait()

    def metrics(self) -> str:
        """The server's own `/metrics` page."""
        return get(f"{self.url}/metrics")

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of what the server has printed."""
        return _last_lines(self.log.read_text(errors="replace"), lines)


METHODS = (
    """
    def __init__(self, {noun}, {other}=0):
        self._{noun} = {noun}
        self._{other} = {other}
        self.closed = False
""",
    """
    @property
    def {noun}(self):
        return self._{noun}
""",
    """
    def {verb}_{noun}(self, {other}=None):
        if {other} is None:
            {other} = self._{noun}
        return self._{verb}({other})
""",
    """
    def {verb}(self, {noun}):
        if not isinstance({noun}, str):
            raise TypeError("{noun} must be a string, not %r" % {noun})
        with self._lock:
            self._{other}.append({noun})
""",
    """
    def _{verb}_all(self):
        result = []
        for {noun} in self._{other}s:
            try:
                result.append({noun}.{verb}())
            except OSError as error:
                self.log.error("cannot {verb} %s: %s", {noun}, error)
        return result
""",
)
CODE_VERBS = (
    "check",
    "close",
    "find",
    "open",
    "parse",
    "read",
    "remove",
    "send",
    "update",
    "write",
)
CODE_NOUNS = (
    "address", "buffer", "encoding", "handler", "header", "line", "message", "name", "path",
    "socket", "stream", "timeout",
)  # fmt: skip


def code_prompts(count: int, *, seed: int = 0, characters: int = 300) -> list[str]:
    """Python in the manner of its standard library, cut off anywhere: what these models know best.

    The models are trained on 256 tokens at a time, and lose their way in much longer prompts.
    """
    chance = random.Random(seed)
    prompts = []
    for _ in range(count):
        text = f"class {chance.choice(CODE_NOUNS).title()}{chance.choice(CODE_NOUNS).title()}:\n"
        while len(text) < characters:
            noun, other = chance.sample(CODE_NOUNS, 2)
            method = chance.choice(METHODS)
            text += method.format(noun=noun, other=other, verb=chance.choice(CODE_VERBS))
        prompts.append(text[:characters])
    return prompts


def random_word_prompts(count: int, *, seed: int = 0, words: int = 60) -> list[str]:
    """Words of random letters in both cases: what no drafter can guess.

    In lower case alone these models soon repeat themselves, which is easy to guess.
    """
    chance = random.Random(seed)
    return [
        " ".join(
            "".join(chance.choices(ascii_letters, k=chance.randint(2, 9))) for _ in range(words)
        )
        for _ in range(count)
    ]


def random_token_prompts(count: int, *, seed: int = 0, tokens: int) -> list[list[int]]:
    """Prompts of an exact number of tokens, special ones left out."""
    chance = random.Random(seed)
    return [chance.choices(range(100, 1024), k=tokens) for _ in range(count)]


SUBJECTS = (
    "Le serveur", "La commande", "Cette option", "Le fichier de configuration", "L'utilisateur",
    "Chaque processus", "La valeur par défaut", "Le programme appelant", "Une page de manuel",
)  # fmt: skip
VERBS = (
    "affiche", "remplace", "ne modifie jamais", "renvoie", "permet de lire", "ouvre", "efface",
    "doit contenir", "décrit", "attend",
)  # fmt: skip
OBJECTS = (
    "le contenu du répertoire courant", "les droits d'accès", "une erreur dans le journal",
    "la sortie standard", "le nom du fichier indiqué", "toutes les lignes vides",
    "la fin de la requête", "les variables d'environnement", "le numéro du signal reçu",
)  # fmt: skip
ENDINGS = (
    "si aucun argument n'est donné", "avant de se terminer", "pour chaque ligne lue",
    "dès que le noyau le demande", "sans jamais s'arrêter", "quand le disque est plein",
)  # fmt: skip


def french_prompts(count: int, *, seed: int = 0, sentences: int = 5) -> list[str]:
    """French in the manner of a manual page: between code and random words for these models."""
    chance = random.Random(seed)
    return [
        " ".join(
            " ".join(chance.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS)) + "."
            for _ in range(sentences)
        )
        for _ in range(count)
    ]
