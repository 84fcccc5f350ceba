"""Small tokenizers, built here: one for each way in which tokenizers treat spaces and markers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from cachecraft_rag.chunks import Chunk, PromptLayout
from cachecraft_rag.segments.known import KnownChunks
from cachecraft_rag.segments.layout import build_layout
from cachecraft_rag.segments.matcher import ChunkMatcher
from cachecraft_rag.segments.render import render_chat
from cachecraft_rag.segments.tokenize import SegmentTokenizer

NAMESPACE = "test-model"

CORPUS = [
    "The river rises in the hills and flows through three towns before it meets the sea.",
    "In 1987 the bridge was rebuilt; its arches had been weak since the flood of 1954.",
    "Who rebuilt the bridge, and when? The council paid 30 percent of it.",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)

LLAMA_CHAT = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] != ['user', 'assistant'][loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)


def byte_level(*, bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML marks, as Qwen, Llama 3 and SmolLM have it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, initial_alphabet=alphabet)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if bos:
        backend.post_processor = TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", backend.token_to_id("<|bos|>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>", chat_template=CHATML
    )


def sentencepiece_like(*, prepend: str) -> PreTrainedTokenizerFast:
    """BPE with byte fallback and a dummy space before a text, as Llama 2 and Mistral have it.

    `prepend`: "normalizer" puts the space before every part, as Llama 2's files do; "first" and
    "always" are schemes of the Metaspace pre-tokenizer.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    if prepend == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=LLAMA_CHAT,
    )


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte_level": byte_level,
    "byte_level_bos": lambda: byte_level(bos=True),
    "llama2": lambda: sentencepiece_like(prepend="normalizer"),
    "metaspace_first": lambda: sentencepiece_like(prepend="first"),
    "metaspace_always": lambda: sentencepiece_like(prepend="always"),
}
REAL = "test_model"
if "CACHECRAFT_TEST_MODEL" in os.environ:
    TOKENIZERS[REAL] = lambda: AutoTokenizer.from_pretrained(os.environ["CACHECRAFT_TEST_MODEL"])


class Lab:
    """A tokenizer with what the tests do with it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.segments = SegmentTokenizer(tokenizer)

    @property
    def markers(self) -> list[str]:
        return [t for t in self.tokenizer.all_special_tokens if t != self.tokenizer.unk_token]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def keeps(self, text: str) -> bool:
        """Whether the tokenizer by itself can give `text` back; real ones lack some control characters."""
        return self.decode(self.tokenizer.encode(f"|{text}", add_special_tokens=False)) == f"|{text}"

    def layout(self, text: str, *chunk_texts: str) -> PromptLayout:
        matches = ChunkMatcher(Chunk(t) for t in chunk_texts).find(text)
        return build_layout(text, matches, self.segments, NAMESPACE)

    def chat_layout(self, messages: Sequence[dict[str, str]], *chunk_texts: str) -> PromptLayout:
        prompt = render_chat(self.tokenizer, messages)
        matches = KnownChunks(1).find("tenant", prompt, [Chunk(t) for t in chunk_texts])
        return build_layout(prompt.text, matches, self.segments, NAMESPACE)

    def assert_decodes_to(self, layout: PromptLayout, text: str) -> None:
        """The ids decode to `text`, behind the BOS that the tokenizer asks for."""
        bos = self.decode(self.segments.bos_ids)
        assert self.decode(layout.token_ids) == bos + text.removeprefix(bos)


@pytest.fixture(scope="session")
def labs() -> dict[str, Lab]:
    return {name: Lab(make()) for name, make in TOKENIZERS.items()}


@pytest.fixture(params=list(TOKENIZERS))
def lab(request: pytest.FixtureRequest, labs: dict[str, Lab]) -> Lab:
    return labs[request.param]


@pytest.fixture(scope="session")
def labs_for(labs: dict[str, Lab]) -> Callable[[str], list[Lab]]:
    """The tokenizers that a random text suits: all that are built here, the real one if it keeps it."""
    return lambda text: [lab for name, lab in labs.items() if name != REAL or lab.keeps(text)]


@pytest.fixture
def chatml(labs: dict[str, Lab]) -> Lab:
    return labs["byte_level"]


@pytest.fixture
def llama(labs: dict[str, Lab]) -> Lab:
    return labs["llama2"]
