"""Small mlx-lm models with random weights, random prompts and a byte tokenizer for the tests."""
import tempfile

import pytest

mx = pytest.importorskip("mlx.core")


def llama(layers=2, heads=4, kv_heads=2, dim=128, vocab=1000, seed=0):
    """Returns a small Llama model."""
    from mlx_lm.models import llama as m
    mx.random.seed(seed)
    model = m.Model(m.ModelArgs(model_type="llama", hidden_size=dim, num_hidden_layers=layers, intermediate_size=2 * dim,
                                num_attention_heads=heads, num_key_value_heads=kv_heads, rms_norm_eps=1e-5, vocab_size=vocab,
                                head_dim=64, max_position_embeddings=32768))
    mx.eval(model.parameters())
    return model


def gemma3(layers=4, window=32, seed=0):
    """Returns a Gemma 3 model in which every second layer has a sliding window."""
    from mlx_lm.models import gemma3_text as m
    mx.random.seed(seed)
    model = m.Model(m.ModelArgs(model_type="gemma3_text", hidden_size=128, num_hidden_layers=layers, intermediate_size=256,
                                num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=1000, sliding_window=window,
                                sliding_window_pattern=2))
    mx.eval(model.parameters())
    return model


def gemma2(layers=2, seed=0):
    """Returns a Gemma 2 model whose soft caps are low enough to change the logits."""
    from mlx_lm.models import gemma2 as m
    mx.random.seed(seed)
    model = m.Model(m.ModelArgs(model_type="gemma2", hidden_size=128, num_hidden_layers=layers, intermediate_size=256,
                                num_attention_heads=4, num_key_value_heads=2, head_dim=64, rms_norm_eps=1e-5, vocab_size=1000,
                                attn_logit_softcapping=0.5, query_pre_attn_scalar=4))
    mx.eval(model.parameters())
    return model


def gpt_oss(layers=2, window=32, seed=0):
    """Returns a GPT-OSS model with learned sinks that change the logits and a window in every second layer."""
    from mlx_lm.models import gpt_oss as m
    mx.random.seed(seed)
    model = m.Model(m.ModelArgs(hidden_size=128, num_hidden_layers=layers, intermediate_size=128, num_attention_heads=4,
                                num_key_value_heads=2, head_dim=64, num_local_experts=4, num_experts_per_tok=2, vocab_size=1000,
                                sliding_window=window))
    for layer in model.layers:
        layer.self_attn.sinks = mx.random.uniform(1, 5, (4,))
    mx.eval(model.parameters())
    return model


def qwen2(bias=150.0, layers=2, seed=0):
    """Returns a Qwen2 model whose key biases in slowly rotating channels have the given size, as in trained models."""
    from mlx_lm.models import qwen2 as m
    mx.random.seed(seed)
    model = m.Model(m.ModelArgs(model_type="qwen2", hidden_size=128, num_hidden_layers=layers, intermediate_size=256, num_attention_heads=4,
                                num_key_value_heads=2, rms_norm_eps=1e-6, vocab_size=1000, max_position_embeddings=32768, rope_theta=1e6,
                                tie_word_embeddings=False))
    for layer in model.layers:
        attention = layer.self_attn
        attention.k_proj.weight, attention.q_proj.weight = 20 * attention.k_proj.weight, 3 * attention.q_proj.weight
        attention.k_proj.bias = (mx.random.normal((2, 32)) * mx.where(mx.arange(32) % 16 >= 12, bias, 0.5)).flatten()
        attention.q_proj.bias = 0.3 * mx.random.normal((128,))
    mx.eval(model.parameters())
    return model


def random_tokens(n, seed=1, vocab=1000):
    """Returns n random token ids as an mx.array."""
    mx.random.seed(seed)
    return mx.random.randint(0, vocab, (n,))


def settled_memory():
    """Returns MLX's active memory after mlx-lm's stream, which computes one token in advance, has finished."""
    from mlx_lm.generate import generation_stream
    mx.synchronize(generation_stream)
    mx.clear_cache()
    return mx.get_active_memory()


def tokenizer():
    """Returns a byte-level tokenizer with a minimal chat template."""
    from mlx_lm.tokenizer_utils import TokenizerWrapper
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    with tempfile.TemporaryDirectory() as folder:
        fast.save_pretrained(folder)
        fast = PreTrainedTokenizerFast.from_pretrained(folder)
    return TokenizerWrapper(fast)


@pytest.fixture
def flat():
    """Installs flatkv with 16-bit pages for one test."""
    import flatkv
    flatkv.install(max_tokens=4096, codec="16/16", max_seqs=32, max_step_tokens=1024)
    yield flatkv
    flatkv.uninstall()
