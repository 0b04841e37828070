"""A tiny random model as a folder on disk, loaded the way any model is, and clients over ASGI and over a socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec.build import LoadedModel, Options, build
from specdec.server.app import ServerConfig, create_app

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER = 32, 2, 4, 2, 8, 64
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

App = Callable[..., FastAPI]


def write_model(folder: Path, *, template: str | None = TEMPLATE) -> Path:
    """A Llama of two layers with random weights, whose tokens are the 256 bytes and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(content, special=True) for content in SPECIAL])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = len(alphabet) + len(SPECIAL)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": len(alphabet),
        "eos_token_id": len(alphabet) + 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_config = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    shapes = {"model.embed_tokens": (vocab_size, WIDTH), "lm_head": (vocab_size, WIDTH)}
    norms = ["model.norm"]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj": (HEADS * HEAD_SIZE, WIDTH),
            f"{prefix}.self_attn.k_proj": (KV_HEADS * HEAD_SIZE, WIDTH),
            f"{prefix}.self_attn.v_proj": (KV_HEADS * HEAD_SIZE, WIDTH),
            f"{prefix}.self_attn.o_proj": (WIDTH, HEADS * HEAD_SIZE),
            f"{prefix}.mlp.gate_proj": (INNER, WIDTH),
            f"{prefix}.mlp.up_proj": (INNER, WIDTH),
            f"{prefix}.mlp.down_proj": (WIDTH, INNER),
        }
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    random = torch.Generator().manual_seed(11)
    weights = {f"{name}.weight": torch.randn(shape, generator=random) * 0.3 for name, shape in shapes.items()}
    weights |= {f"{name}.weight": torch.ones(WIDTH) for name in norms}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def load_tiny(folder: Path, **options: object) -> LoadedModel:
    """The tiny model in fp32, with a small pool."""
    settings: dict[str, object] = {
        "device": "cpu", "dtype": "float32", "max_model_len": 512, "kv_cache_tokens": 2048, "block_size": 16,
    }  # fmt: skip
    return build(str(folder), Options(**(settings | options)))  # type: ignore[arg-type]


@pytest.fixture
def loaded(model_folder: Path) -> LoadedModel:
    return load_tiny(model_folder)


@asynccontextmanager
async def asgi_client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running app, without a socket."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


def free_blocks(loaded: LoadedModel) -> int:
    """Blocks that could be taken now, cached prefixes among them; checks the pool's books."""
    scheduler = loaded.engine.scheduler
    scheduler.pool.check(scheduler.tables())
    return scheduler.pool.num_available


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until `condition` holds; fails the test if it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


class Server:
    """An app behind a real socket, in a thread of this process."""

    def __init__(self, loaded: LoadedModel, config: ServerConfig | None = None) -> None:
        self.loaded = loaded
        self.app = create_app(loaded, config or ServerConfig())
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=0, http="h11", loop="asyncio", lifespan="on", log_level="warning")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def port(self) -> int:
        """The port that the system chose."""
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """Where clients find it."""
        return f"http://127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[Server]:
    with Server(load_tiny(model_folder)) as running:
        yield running
