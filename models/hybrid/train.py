"""Trains a small byte-level chat model of Qwen3.5's architecture: gated delta net layers and gated full attention, 3:1.

The model is trained on plain-text books and on generated conversations, in which it answers questions about stated facts. The facts have the form
of the needle model's facts (../needle/train.py). Tokens 0 to 255 are bytes, 257 is <|im_start|> and 258 is <|im_end|>. Token 256 is a
merge of two bytes that never occur in UTF-8, because flatkv rejects BPE vocabularies without merges.

usage: train.py SECONDS --text DIR [--out DIR]
SECONDS is the total run time, including compilation. Training starts with sequences of 256 tokens and continues with longer sequences
once the model answers most of the questions. Training stops with exit code 3 if it answers few of them after 30 % of the time. All batches
have the same number of tokens, so that the layers are compiled once. The model, its config and its tokenizer are written at the end.
Files in DIR whose names start with "heldout" are only evaluated. One run on an H200 with SECONDS = 390 made the model in this folder,
from the novels A Tale of Two Cities, Middlemarch, Moby-Dick, Pride and Prejudice, The Count of Monte Cristo and War and Peace and
from plays of Shakespeare."""
import argparse, glob, importlib.util, json, math, os, random, sys, time
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import IterableDataset, DataLoader, get_worker_info

HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location("needle", os.path.join(HERE, "../needle/train.py"))
needle = importlib.util.module_from_spec(spec); spec.loader.exec_module(needle)

START, END, V = 257, 258, 264                                # token 256 and the five tokens that pad the vocabulary are never used
D, L, FF, EPS, THETA = 256, 8, 320, 1e-6, 1e4
HQ, HK, HD, ROT = 4, 2, 128, 32                              # attention: query heads, KV heads, head dimension, dimensions with RoPE
NK, NV, ND, TAPS = 2, 4, 64, 4                               # delta net: key heads, value heads, head dimension, taps of the convolution
C = 64                                                       # tokens per chunk of the delta rule in training
CONFIG = dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", vocab_size=V, hidden_size=D, num_hidden_layers=L,
              intermediate_size=FF, num_attention_heads=HQ, num_key_value_heads=HK, head_dim=HD, linear_num_key_heads=NK,
              linear_num_value_heads=NV, linear_key_head_dim=ND, linear_value_head_dim=ND, linear_conv_kernel_dim=TAPS, hidden_act="silu",
              layer_types=["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(L)], rms_norm_eps=EPS,
              rope_parameters=dict(rope_type="default", rope_theta=THETA, partial_rotary_factor=ROT / HD, mrope_section=[6, 5, 5], mrope_interleaved=True),
              max_position_embeddings=8192, tie_word_embeddings=True, attn_output_gate=True, dtype="float16", eos_token_id=END, pad_token_id=END)
TOKENS = 16384                                               # per batch
# Per stage: its end as a fraction of the run time, tokens per sequence, share of repeated strings, share of book text. The rest are conversations.
STAGES = ((.3, 256, .35, .1), (.45, 1024, .15, .25), (1, 4096, .05, .4))
MUON, ADAM, DECAY = .01, 3e-3, .1                            # peak learning rates of hidden matrices and of other parameters, weight decay
ANSWER, DOCUMENT, TEXT = 4.0, .25, .5                        # loss weights of answers, of the rest of a conversation, of book text
RECALL = .3, .9                                              # share of right answers below which training is aborted, and the share that ends the first stage

# ---- data

class Books:
    """Book text as printed, and as ASCII with one line per paragraph."""
    def __init__(s, folder, heldout=False):
        files = [f for f in sorted(glob.glob(os.path.join(folder, "*.txt"))) if os.path.basename(f).startswith("heldout") == heldout]
        texts = [open(f, encoding="utf-8", errors="ignore").read() for f in files]
        s.texts = [b"\n\n".join(t.encode() for t in texts), b"\n\n".join(needle.clean(t) for t in texts)]
    def excerpt(s, r, n):
        t = s.texts[r.random() < .5]; at = r.randrange(0, len(t) - n); return t[at:at + n]
class Chat:
    """Tokens and loss weights of a conversation. The weight of a token applies to the loss of predicting this token."""
    def __init__(s): s.tokens, s.weights = [], []
    def add(s, text, weight): s.tokens += list(text); s.weights += [weight] * len(text)
    def begin(s, role): s.tokens.append(START); s.weights.append(DOCUMENT); s.add(role + b"\n", DOCUMENT)
    def end(s, weight): s.tokens += [END, 10]; s.weights += [weight, DOCUMENT]
def conversation(books, r, n):
    """Returns tokens and weights of a conversation with at least n tokens: a text with facts, then questions about them."""
    chat, facts = Chat(), []
    def fact():
        f = (r.choice(needle.LEX["kind"]), needle.name(r), "".join(r.choice("0123456789") for _ in range(r.randint(4, 7))))
        facts[:] = [x for x in facts if x[1] != f[1]] + [f]; return f
    def document(n_text, n_facts):
        text = needle.prose(r, n_text) if r.random() < .3 else books.excerpt(r, n_text); last = 0
        for at in sorted(r.randrange(0, n_text) for _ in range(n_facts)):
            end = text.rfind(b".", last, at) + 1
            if end > 0 and r.random() < .7: at = end         # mostly at the end of a sentence
            chat.add(text[last:at], DOCUMENT); chat.add(b" The %s of %s is %s. " % tuple(x.encode() for x in fact()), DOCUMENT); last = at
        chat.add(text[last:], DOCUMENT)
    size, system, most = 1 + int(n * r.uniform(0, .25 if n < 512 else .9)), r.random() < .4, 1 + n // 400
    if system: chat.begin(b"system"); document(size, r.randint(1, 1 + most)); chat.end(DOCUMENT)
    first = not system
    while len(chat.tokens) <= n:
        chat.begin(b"user")
        if first or n > 512 and r.random() < .12:
            document(size if first else r.randint(20, 400), r.randint(1, 1 + most) if first else r.randint(0, 2)); chat.add(b"\n\n", DOCUMENT)
        first = False
        if not facts or r.random() < .15:                    # the user states a fact
            chat.add(b"The %s of %s is %s." % tuple(x.encode() for x in fact()), DOCUMENT); chat.end(DOCUMENT)
            chat.begin(b"assistant"); chat.add(b"Noted.", 1.0); chat.end(1.0); continue
        kind, name, number = (x.encode() for x in r.choice(facts)); alone = r.random() < .6
        if r.random() < .25: chat.add(b"\n\n", DOCUMENT)
        chat.add(b"What is the %s of %s?%s" % (kind, name, b" Answer with the number alone." if alone else b""), DOCUMENT); chat.end(DOCUMENT); chat.begin(b"assistant")
        if r.random() < .3:                                  # "<think>" is part of the prompt
            chat.add(b"<think>\n", 0.0); chat.add(b"The %s of %s is " % (kind, name), 1.0); chat.add(number, ANSWER); chat.add(b".\n</think>\n\n", 1.0)
        if not alone: chat.add(b"The %s of %s is " % (kind, name), 1.0)
        chat.add(number, ANSWER); chat.add(b"" if alone else b".", 1.0); chat.end(1.0)
    return chat.tokens, chat.weights
ALPHABETS = (b"0123456789", b"abcdefghijklmnopqrstuvwxyz", bytes(range(33, 127)))
def repeats(r, n):
    """Returns tokens and weights of random strings that recur. All but the first two bytes of a recurring string can be predicted."""
    chat = Chat(); strings = []; gap = r.choice((b" ", b"\n", b", ", b". ")); a = r.choice(ALPHABETS)
    for _ in range(r.randint(1, 2 + n // 100)):
        strings.append(needle.name(r).encode() + b" is " + bytes(r.choices(a, k=r.randint(4, 8))) if r.random() < .3 else bytes(r.choices(a, k=r.randint(6, 24))))
    seen = set()
    while len(chat.tokens) <= n:
        i = r.randrange(len(strings)); s = strings[i]
        if i in seen: chat.add(s[:2], .1); chat.add(s[2:], 1.0)
        else: chat.add(s, .1); seen.add(i)
        chat.add(gap, .1)
    return chat.tokens, chat.weights
def sample(books, r, n, repeated, text):
    """Returns tokens [n + 1] and loss weights [n]."""
    kind = r.random()
    if kind < text: return np.frombuffer(books.excerpt(r, n + 1), np.uint8).astype(np.int16), np.full(n, TEXT, np.float32)
    t, w = repeats(r, n) if kind < text + repeated else conversation(books, r, n); return np.array(t[:n + 1], np.int16), np.array(w[1:n + 1], np.float32)
class Stream(IterableDataset):
    def __init__(s, books, n, *shares): s.books, s.n, s.shares = books, n, shares
    def __iter__(s):
        wi = get_worker_info(); r = random.Random(s.n * 1000 + (wi.id if wi else 0))
        while True: yield tuple(map(torch.from_numpy, sample(s.books, r, s.n, *s.shares)))

# ---- model. Activations are [TOKENS, ...] regardless of the sequence length, which only scan and attend use.

n_sequence = 0                                               # tokens per sequence
def split(x): return x.reshape(-1, n_sequence // C, *x.shape[1:]).transpose(0, 1).reshape(n_sequence // C, -1, ND, ND)
def join(x, like): n, b = x.shape[0], like.shape[0] // x.shape[0]; return x.view(n, b, *like.shape[1:]).transpose(0, 1).reshape(like.shape)
@torch.library.custom_op("hybrid::scan", mutates_args=())
def scan(p: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Returns the states before each chunk: S[0] = 0, S[i + 1] = P[i] S[i] + R[i]. p, r: [chunks, NV, ND, ND]."""
    ps, rs = split(p), split(r); s = torch.zeros_like(rs)
    for i in range(len(s) - 1): torch.baddbmm(rs[i], ps[i], s[i], out=s[i + 1])
    return join(s, p)
@torch.library.custom_op("hybrid::scan_back", mutates_args=())
def scan_back(ds: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Returns the gradients of R[i], which are those of S[i + 1]."""
    ps, g = split(p), split(ds); dr = torch.zeros_like(g)
    for i in range(len(g) - 2, -1, -1): torch.baddbmm(g[i + 1], ps[i + 1].transpose(1, 2), dr[i + 1], out=dr[i])
    return join(dr, p)
@torch.library.custom_op("hybrid::inverse", mutates_args=())
def inverse(a: torch.Tensor) -> torch.Tensor:
    """Returns the inverses of unit lower triangular matrices."""
    return torch.linalg.solve_triangular(a, torch.eye(C, device=a.device).expand_as(a), upper=False, unitriangular=True).contiguous()
def scan_grad(ctx, ds): p, s = ctx.saved_tensors; dr = scan_back(ds.contiguous(), p); return dr @ s.transpose(2, 3), dr
def inverse_grad(ctx, g): t = ctx.saved_tensors[0].transpose(-1, -2); return -(t @ g @ t)
scan.register_fake(lambda p, r: torch.empty_like(r)); scan_back.register_fake(lambda ds, p: torch.empty_like(p)); inverse.register_fake(torch.empty_like)
scan.register_autograd(scan_grad, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output))
inverse.register_autograd(inverse_grad, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))

def delta_rule(q, k, v, g, beta):
    """Chunkwise gated delta rule (WY form) in f32. q, k, v: [T, NV, ND]; g, beta: [T, NV]."""
    n = q.shape[0] // C
    q, k, v = (x.float().view(n, C, NV, ND).transpose(1, 2).contiguous() for x in (q, k, v))
    g, beta = (x.float().view(n, C, NV, 1).transpose(1, 2) for x in (g, beta))
    g = g.cumsum(2); last = g[:, :, -1:]
    upper = torch.ones(C, C, dtype=torch.bool, device=q.device).triu(1)
    decay = (g - g.transpose(2, 3)).masked_fill(upper, -math.inf).exp()
    kb = k * beta
    t = inverse(((kb @ k.transpose(2, 3) * decay).tril(-1) + torch.eye(C, device=q.device)).contiguous())
    u, w = t @ (v * beta), t @ (kb * g.exp())
    kd = (k * (last - g).exp()).transpose(2, 3)
    s = scan((last.exp() * torch.eye(ND, device=q.device) - kd @ w).contiguous(), (kd @ u).contiguous())
    o = (q * g.exp()) @ s + (q @ k.transpose(2, 3) * decay) @ (u - w @ s)
    return o.transpose(1, 2).reshape(n * C, NV, ND)
@torch.compiler.disable
def attend(q, k, v):
    """Causal attention. q: [T, HQ, HD]; k, v: [T, HK, HD]."""
    q, k, v = (x.reshape(-1, n_sequence, x.shape[1], HD).transpose(1, 2) for x in (q, k, v))
    a = F.scaled_dot_product_attention(q, k.repeat_interleave(HQ // HK, 1), v.repeat_interleave(HQ // HK, 1), is_causal=True)
    return a.transpose(1, 2).reshape(-1, HQ, HD)

linear = lambda i, o: nn.Linear(i, o, bias=False)
def rms(x): return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
class RMS(nn.Module):
    def __init__(s, d): super().__init__(); s.weight = nn.Parameter(torch.zeros(d))
    def forward(s, x): return rms(x.float()) * (1 + s.weight)
class Gated(nn.Module):
    def __init__(s): super().__init__(); s.weight = nn.Parameter(torch.ones(ND))
    def forward(s, x, z): return rms(x.float()) * s.weight * F.silu(z.float())
class DeltaNet(nn.Module):
    def __init__(s):
        super().__init__(); channels = (2 * NK + NV) * ND
        s.in_proj_qkv, s.in_proj_z, s.in_proj_b, s.in_proj_a = linear(D, channels), linear(D, NV * ND), linear(D, NV), linear(D, NV)
        s.conv1d = nn.Conv1d(channels, channels, TAPS, groups=channels, bias=False); s.norm, s.out_proj = Gated(), linear(NV * ND, D)
        dt = torch.exp(torch.empty(NV).uniform_(math.log(1e-3), math.log(.1)))
        s.A_log, s.dt_bias = nn.Parameter(torch.empty(NV).uniform_(1, 16).log()), nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
    def forward(s, h, at, rope):
        n = h.shape[0]; u, w = F.pad(s.in_proj_qkv(h), (0, 0, TAPS - 1, 0)), s.conv1d.weight
        u = F.silu(sum(torch.where((at >= TAPS - 1 - i)[:, None], u[i:i + n], 0) * w[:, 0, i] for i in range(TAPS)))
        q, k, v = u.float().split([NK * ND, NK * ND, NV * ND], -1)
        q, k = (x.view(n, NK, ND) for x in (q, k))
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, k = (x.repeat_interleave(NV // NK, 1) for x in (q * ND ** -.5, k))
        with torch.autocast(h.device.type, enabled=False):
            g = -s.A_log.exp() * F.softplus(s.in_proj_a(h) + s.dt_bias)
            o = delta_rule(q, k, v.view(n, NV, ND), g, s.in_proj_b(h).sigmoid())
        return s.out_proj(s.norm(o, s.in_proj_z(h).view(n, NV, ND)).reshape(n, NV * ND))
def rotate(x, rope):
    c, s = rope; x, rest = x[..., :ROT].float(), x[..., ROT:].float(); a, b = x.chunk(2, -1)
    return torch.cat([a * c - b * s, b * c + a * s, rest], -1)
class Attention(nn.Module):
    def __init__(s):
        super().__init__(); s.q_proj, s.k_proj, s.v_proj, s.o_proj = linear(D, 2 * HQ * HD), linear(D, HK * HD), linear(D, HK * HD), linear(HQ * HD, D)
        s.q_norm, s.k_norm = RMS(HD), RMS(HD)
    def forward(s, h, at, rope):
        n = h.shape[0]; q, gate = s.q_proj(h).view(n, HQ, 2 * HD).chunk(2, -1); v = s.v_proj(h).view(n, HK, HD)
        q = rotate(s.q_norm(q), rope).to(v.dtype); k = rotate(s.k_norm(s.k_proj(h).view(n, HK, HD)), rope).to(v.dtype)
        return s.o_proj((attend(q, k, v) * gate.sigmoid()).reshape(n, HQ * HD))
class MLP(nn.Module):
    def __init__(s): super().__init__(); s.gate_proj, s.up_proj, s.down_proj = linear(D, FF), linear(D, FF), linear(FF, D)
    def forward(s, h): return s.down_proj(F.silu(s.gate_proj(h)) * s.up_proj(h))
class Block(nn.Module):
    def __init__(s, kind):
        super().__init__(); s.input_layernorm, s.post_attention_layernorm, s.mlp, s.full = RMS(D), RMS(D), MLP(), kind == "full_attention"
        if s.full: s.self_attn = Attention()
        else: s.linear_attn = DeltaNet()
    def forward(s, x, at, rope):
        x = x + (s.self_attn if s.full else s.linear_attn)(s.input_layernorm(x), at, rope)
        return x + s.mlp(s.post_attention_layernorm(x))
class Net(nn.Module):
    def __init__(s):
        super().__init__(); s.embed_tokens = nn.Embedding(V, D); s.layers = nn.ModuleList(Block(k) for k in CONFIG["layer_types"]); s.norm = RMS(D)
        for k, p in s.named_parameters():
            if p.dim() == 2: nn.init.normal_(p, std=.02 if "embed" in k else D ** -.5 / 2 / (math.sqrt(2 * L) if "o_proj" in k or "out_proj" in k or "down_proj" in k else 1))
    def forward(s, t):
        """Returns logits [B, T, V] of tokens [B, T]. T is a multiple of C."""
        global n_sequence; n_sequence = t.shape[1]
        at = torch.arange(t.shape[1], device=t.device).repeat(t.shape[0])
        a = (at[:, None] * THETA ** (-torch.arange(0, ROT, 2, device=t.device) / ROT))[:, None]; rope = a.cos(), a.sin()
        x = s.embed_tokens(t.flatten())
        for b in s.layers: x = b(x, at, rope)
        return F.linear(s.norm(x), s.embed_tokens.weight).view(*t.shape, V)

# ---- training

def orthogonal(x):
    """Returns matrices [N, R, C] with singular values close to 1 (Newton-Schulz iteration)."""
    tall = x.shape[1] > x.shape[2]; x = x.transpose(1, 2) if tall else x
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(5): a = x @ x.transpose(1, 2); x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.transpose(1, 2) if tall else x).float()
class Optimizer:
    """Muon for the hidden matrices, Adam for embeddings, convolutions, gates and vectors. rate scales both learning rates."""
    def __init__(s, net, muon, dev):
        s.muon, s.adam, s.rate = {}, [], torch.zeros((), device=dev)
        for k, p in net.named_parameters():
            if muon and p.dim() == 2 and "embed" not in k and "in_proj_a" not in k and "in_proj_b" not in k: s.muon.setdefault(tuple(p.shape), []).append(p)
            else: s.adam.append((p, torch.zeros_like(p), torch.zeros_like(p), DECAY if p.dim() == 2 and "in_proj_a" not in k and "in_proj_b" not in k else 0))
        s.momentum = {k: torch.zeros(len(ps), *k, device=dev) for k, ps in s.muon.items()}
    @torch.no_grad()
    def step(s):
        for k, ps in s.muon.items():
            g, m = torch.stack([p.grad for p in ps]), s.momentum[k]; m.lerp_(g, .05)
            u = orthogonal(g.lerp(m, .95)) * (s.rate * -MUON * max(1, k[0] / k[1]) ** .5)
            for p, x in zip(ps, u): p.mul_(1 - s.rate * MUON * DECAY).add_(x)
        for p, m, v, decay in s.adam:                        # no bias correction, because the learning rate is warmed up
            m.lerp_(p.grad, .1); v.lerp_(p.grad.square(), .05)
            if decay: p.mul_(1 - s.rate * ADAM * decay)
            p.add_(m / (v.sqrt() + 1e-8) * (s.rate * -ADAM))
class Step:
    """A training step for one sequence length. On a GPU, the step is a CUDA graph."""
    def __init__(s, net, opt, n, dev, graph):
        s.net, s.opt, s.params = net, opt, list(net.parameters())
        s.t, s.w = torch.zeros(TOKENS // n, n + 1, dtype=torch.long, device=dev), torch.ones(TOKENS // n, n, device=dev); s.graph = None
        if not graph: return
        stream = torch.cuda.Stream(); stream.wait_stream(torch.cuda.current_stream()); opt.rate.zero_()
        with torch.cuda.stream(stream):
            for _ in range(3): s.run()
        torch.cuda.current_stream().wait_stream(stream); torch.cuda.synchronize(); s.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(s.graph, capture_error_mode="thread_local"): s.run()
    def run(s):
        for p in s.params: p.grad = None
        with torch.autocast(s.t.device.type, torch.bfloat16): lg = s.net(s.t[:, :-1])
        target = s.t[:, 1:]
        s.loss = F.cross_entropy(lg.float().view(-1, V), target.flatten(), reduction="none").view(s.w.shape); s.hit = lg.argmax(-1) == target
        ((s.loss * s.w).sum() / s.w.sum()).backward(); s.norm = torch.nn.utils.clip_grad_norm_(s.params, 1.0)
        for p in s.params: p.grad.nan_to_num_(0, 0, 0)       # a step with an overflow changes nothing
        s.opt.step()
    def __call__(s, t, w):
        s.t.copy_(t, non_blocking=True); s.w.copy_(w, non_blocking=True)
        if s.graph: s.graph.replay()
        else: s.run()
def answers(hit, weights):
    """Returns the number of answers with every digit right, and the number of answers. hit, weights: [B, T]."""
    right = asked = 0
    for h, w in zip(hit.tolist(), weights.tolist()):
        j = 0
        while j < len(w):
            if w[j] != ANSWER: j += 1; continue
            end = j
            while end < len(w) and w[end] == ANSWER: end += 1
            asked += 1; right += all(h[j:end]); j = end
    return right, asked
def write_json(path, value, **more):
    with open(path, "w") as f: json.dump(value, f, **more); f.write("\n")
def save_tokenizer(out):
    """Writes a byte-level BPE vocabulary in which token i is byte i."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]; others = [b for b in range(256) if b not in printable]
    vocab = {chr(b) if b in printable else chr(256 + others.index(b)): b for b in range(256)}; vocab["\u00fe\u00ff"] = 256
    added = [dict(id=i, content=c, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for i, c in ((START, "<|im_start|>"), (END, "<|im_end|>"))]
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    bpe = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False, byte_fallback=False,
               ignore_merges=False, vocab=vocab, merges=["\u00fe \u00ff"])
    write_json(os.path.join(out, "tokenizer.json"), dict(version="1.0", truncation=None, padding=None, added_tokens=added, normalizer=None, pre_tokenizer=level,
                                                         post_processor=None, decoder=level, model=bpe))
    write_json(os.path.join(out, "tokenizer_config.json"), dict(tokenizer_class="PreTrainedTokenizerFast", add_prefix_space=False, eos_token="<|im_end|>", pad_token="<|im_end|>",
                                                                clean_up_tokenization_spaces=False, model_max_length=CONFIG["max_position_embeddings"]), indent=1)
def save(net, out):
    from safetensors.torch import save_file
    path = os.path.join(out, "model.safetensors")
    save_file({"model." + k: v.detach().half().contiguous().cpu() for k, v in net.state_dict().items()}, path + ".part"); os.replace(path + ".part", path)
    write_json(os.path.join(out, "config.json"), CONFIG, indent=1); save_tokenizer(out)
@torch.no_grad()
def evaluate(net, folder, dev, lengths, count):
    """Prints the loss on text that the model was not trained on, and the share of right answers by distance of the fact."""
    books, r = Books(folder, heldout=True), random.Random(5)
    for n in lengths:
        ls, right, m = 0, 0, max(1, 16384 // n)
        for _ in range(2):
            t = torch.tensor(np.stack([np.frombuffer(books.excerpt(r, n + 1), np.uint8) for _ in range(m)]).astype(np.int64), device=dev)
            with torch.autocast(dev, torch.bfloat16): ls += F.cross_entropy(net(t[:, :-1]).float().view(-1, V), t[:, 1:].flatten()).item() / 2
        for _ in range(count):
            kind, name, number = r.choice(needle.LEX["kind"]).encode(), needle.name(r).encode(), "".join(r.choice("0123456789") for _ in range(7)).encode()
            fact = b" The %s of %s is %s. " % (kind, name, number)
            tail = [*b"\n\nWhat is the %s of %s? Answer with the number alone." % (kind, name), END, 10, START, *b"assistant\n", *number, END]
            text = books.excerpt(r, n + 1 - 6 - len(fact) - len(tail)); at = r.randrange(len(text))
            t = torch.tensor([START, *b"user\n", *text[:at], *fact, *text[at:], *tail], device=dev)[None]
            with torch.autocast(dev, torch.bfloat16): hit = net(t[:, :-1]).argmax(-1)[0, -8:] == t[0, -8:]
            right += bool(hit.all())
        print(f"eval {n}: {ls / math.log(2):.3f} bits/byte, {right}/{count} answers", flush=True)
def main():
    ap = argparse.ArgumentParser(); ap.add_argument("seconds", type=float); ap.add_argument("--text", required=True); ap.add_argument("--out", default=".")
    ap.add_argument("--eager", action="store_true", help="do not compile the layers"); ap.add_argument("--no-graph", action="store_true", help="do not use CUDA graphs")
    ap.add_argument("--adam", action="store_true", help="use Adam for all parameters"); ap.add_argument("--workers", type=int, default=14); o = ap.parse_args()
    t0 = time.time(); dev = "cuda" if torch.cuda.is_available() else "cpu"; torch.set_float32_matmul_precision("high"); torch.manual_seed(1)
    net = Net().to(dev); print("parameters", sum(p.numel() for p in net.parameters()), flush=True)
    books = Books(o.text); loaders = [iter(DataLoader(Stream(books, n, *shares), batch_size=TOKENS // n, num_workers=o.workers, pin_memory=dev == "cuda", prefetch_factor=4)) for _, n, *shares in STAGES]
    torch._dynamo.config.suppress_errors = True; torch._dynamo.config.cache_size_limit = 64
    if not o.eager:
        for b in net.layers: b.compile(dynamic=False)
    opt = Optimizer(net, not o.adam, dev); steps = [Step(net, opt, n, dev, dev == "cuda" and not o.no_graph) for _, n, *_ in STAGES]
    print(f"ready after {time.time() - t0:.0f} s", flush=True)
    stage = count = 0; shown = time.time(); right, asked = 0, 0
    while (part := (time.time() - t0) / o.seconds) < 1:
        if part > STAGES[stage][0]:
            if stage == 0 and right < RECALL[0] * asked: print("few answers are right: stopped"); sys.exit(3)
            stage += 1
        opt.rate.fill_(min(1, (count + 1) / 100, (1 - part) / .4) + 1e-3)
        steps[stage](*next(loaders[stage])); count += 1
        if count % 50 == 0 and stage == 0 or time.time() - shown > 5:
            s = steps[stage]; a, b = answers(s.hit, s.w); right, asked = .8 * right + a, .8 * asked + b
            if time.time() - shown > 5 or count % 250 == 0:
                digits = s.w == ANSWER; text = s.w == TEXT; text[:, :128] = False; loss = [s.loss[x].mean().item() / math.log(2) for x in (text, s.w == 1, digits)]; shown = time.time()
                print(f"{count} {shown - t0:.0f}s {s.w.shape[1]} {count * TOKENS / 1e6:.0f}M tokens, bits: text {loss[0]:.3f} repeats {loss[1]:.3f} digits {loss[2]:.3f}, right: digits {s.hit[digits].float().mean().item():.3f} answers {right / max(1, asked):.3f}, norm {s.norm.item():.2f}", flush=True)
            if stage == 0 and right > RECALL[1] * asked and asked > 100: stage = 1; print(f"{count} {time.time() - t0:.0f}s answers {right / asked:.3f}: next stage", flush=True)
    save(net, o.out); plain = Net().to(dev); plain.load_state_dict(net.state_dict()); evaluate(plain, o.text, dev, (512, 1024, 2048, 4096, 8192), 100)  # the copy is not compiled

if __name__ == "__main__":
    main()
