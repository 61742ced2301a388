"""Trains a tiny hybrid model on the task of the needle model: gated delta nets and gated attention in the architecture of Qwen3.5
(3 recurrent layers per attention layer), with byte tokens. With an exact cache and exact states it recalls facts at any distance.

usage: train.py STAGE MINUTES [STAGE MINUTES]... [--text DIR] [--out DIR]
Stages are those of ../needle/train.py. Requires a GPU. `check` compares the layers with transformers."""
import argparse, importlib.util, json, math, os, sys
import torch, torch.nn as nn, torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location("needle_train", os.path.join(HERE, "..", "needle", "train.py"))
needle = importlib.util.module_from_spec(spec); spec.loader.exec_module(needle)
CFG = dict(vocab_size=256, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=1, head_dim=64,
           intermediate_size=384, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64,
           linear_value_head_dim=64, linear_conv_kernel_dim=4, full_attention_interval=4, rms_norm_eps=1e-6,
           rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25))
V, D, L, HQ, HK, HD, FF, LK, LV, LD, _, CONV, EVERY, EPS, ROPE = CFG.values()
ROTARY = int(HD * ROPE["partial_rotary_factor"])

def rope(n, dev):
    inv = ROPE["rope_theta"] ** (-torch.arange(0, ROTARY, 2, device=dev, dtype=torch.float64) / ROTARY)
    a = torch.outer(torch.arange(n, device=dev, dtype=torch.float64), inv)
    return torch.cat([a.cos()] * 2, -1).float(), torch.cat([a.sin()] * 2, -1).float()
def rotate(x, c, s):
    r, h = x[..., :ROTARY].float(), ROTARY // 2
    return torch.cat([(r * c + torch.cat([-r[..., h:], r[..., :h]], -1) * s).to(x.dtype), x[..., ROTARY:]], -1)
def delta_rule(q, k, v, g, beta, size=64):
    """The gated delta rule for q, k, v [B, T, H, LD] and g, beta [B, T, H], in chunks: products within a chunk are computed for all
    chunks at once, and a loop over the chunks carries the state."""
    t, (b, _, h, d) = q.shape[1], q.shape
    pad = -t % size
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (F.pad(x.float(), (0, 0, 0, 0, 0, pad)).view(b, -1, size, h, d).permute(0, 3, 1, 2, 4) for x in (q, k, v))
        g, beta = (F.pad(x.float(), (0, 0, 0, pad)).view(b, -1, size, h).permute(0, 3, 1, 2) for x in (g, beta))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
        q, sums, lower = q * d ** -.5, g.cumsum(-1), torch.ones(size, size, device=q.device).tril()
        decay = ((sums[..., :, None] - sums[..., None, :]) * lower).exp() * lower
        inner = (beta[..., None] * k) @ k.transpose(-1, -2) * decay.tril(-1) + torch.eye(size, device=q.device)
        both = torch.linalg.solve_triangular(inner, beta[..., None] * torch.cat([v, k * sums.exp()[..., None]], -1), upper=False, unitriangular=True)
        keys = (k * (sums[..., -1:] - sums).exp()[..., None]).transpose(-1, -2)
        state, states, updates = torch.zeros(b * h, d, d, device=q.device), [], []
        for u, w, kt, last in zip(*(x.flatten(0, 1).unbind(1) for x in (*both.chunk(2, -1), keys, sums[..., -1:, None].exp()))):
            states.append(state); updates.append(torch.baddbmm(u, w, state, alpha=-1))
            state = torch.baddbmm(state * last, kt, updates[-1])
        states, updates = (torch.stack(x, 1).view(b, h, -1, *x[0].shape[1:]) for x in (states, updates))
        o = (q * sums.exp()[..., None]) @ states + q @ k.transpose(-1, -2) * decay @ updates
    return o.permute(0, 2, 3, 1, 4).reshape(b, t + pad, h, d)[:, :t]
class RMS(nn.Module):
    """The stored weight is an offset from 1."""
    def __init__(s, d): super().__init__(); s.weight = nn.Parameter(torch.zeros(d))
    def forward(s, x): return F.rms_norm(x, (x.shape[-1],), (1 + s.weight).to(x.dtype), EPS)
def lin(i, o): return nn.Linear(i, o, bias=False)
class Attn(nn.Module):
    def __init__(s):
        super().__init__()
        s.q_proj, s.k_proj, s.v_proj, s.o_proj = lin(D, 2 * HQ * HD), lin(D, HK * HD), lin(D, HK * HD), lin(HQ * HD, D)
        s.q_norm, s.k_norm = RMS(HD), RMS(HD)
    def forward(s, h, c, sn):
        b, n, _ = h.shape
        q, gate = s.q_proj(h).view(b, n, HQ, 2 * HD).chunk(2, -1)
        q = rotate(s.q_norm(q).transpose(1, 2), c, sn)
        k = rotate(s.k_norm(s.k_proj(h).view(b, n, HK, HD)).transpose(1, 2), c, sn)
        v = s.v_proj(h).view(b, n, HK, HD).transpose(1, 2)
        a = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        return s.o_proj(a.transpose(1, 2).reshape(b, n, HQ * HD) * torch.sigmoid(gate.reshape(b, n, HQ * HD)))
class DeltaNet(nn.Module):
    def __init__(s):
        super().__init__()
        width = (2 * LK + LV) * LD
        s.in_proj_qkv, s.in_proj_z, s.in_proj_b, s.in_proj_a = lin(D, width), lin(D, LV * LD), lin(D, LV), lin(D, LV)
        s.conv1d = nn.Conv1d(width, width, CONV, groups=width, bias=False, padding=CONV - 1)
        step = torch.exp(torch.empty(LV).uniform_(math.log(1e-3), math.log(1e-1)))   # time scales between about 10 and 1,000 tokens
        s.dt_bias, s.A_log = nn.Parameter(step + torch.log(-torch.expm1(-step))), nn.Parameter(torch.empty(LV).uniform_(1, 4).log())
        s.norm, s.out_proj = RMS(LD), lin(LV * LD, D)
        nn.init.ones_(s.norm.weight)
    def forward(s, h, c, sn):
        b, n, _ = h.shape
        u = F.silu(s.conv1d(s.in_proj_qkv(h).transpose(1, 2))[..., :n]).transpose(1, 2)
        q, k, v = (x.reshape(b, n, -1, LD) for x in u.split([LK * LD, LK * LD, LV * LD], -1))
        q, k = (x.repeat_interleave(LV // LK, 2) for x in (q, k))
        g = -s.A_log.float().exp() * F.softplus(s.in_proj_a(h).float() + s.dt_bias)
        o = delta_rule(q, k, v, g, torch.sigmoid(s.in_proj_b(h)))
        o = F.rms_norm(o.float(), (LD,), s.norm.weight.float(), EPS) * F.silu(s.in_proj_z(h).view(b, n, LV, LD).float())
        return s.out_proj(o.reshape(b, n, LV * LD).to(h.dtype))
class MLP(nn.Module):
    def __init__(s): super().__init__(); s.gate_proj, s.up_proj, s.down_proj = lin(D, FF), lin(D, FF), lin(FF, D)
    def forward(s, h): return s.down_proj(F.silu(s.gate_proj(h)) * s.up_proj(h))
class Block(nn.Module):
    def __init__(s, i):
        super().__init__(); s.input_layernorm, s.post_attention_layernorm, s.mlp = RMS(D), RMS(D), MLP()
        s.full = (i + 1) % EVERY == 0
        if s.full: s.self_attn = Attn()
        else: s.linear_attn = DeltaNet()
    def forward(s, x, c, sn):
        x = x + F.dropout((s.self_attn if s.full else s.linear_attn)(s.input_layernorm(x), c, sn), needle.DROP, s.training)
        return x + F.dropout(s.mlp(s.post_attention_layernorm(x)), needle.DROP, s.training)
class Net(nn.Module):
    def __init__(s):
        super().__init__(); s.embed_tokens = nn.Embedding(V, D); s.layers = nn.ModuleList(Block(i) for i in range(L)); s.norm = RMS(D)
        for k, p in s.named_parameters():
            if p.dim() == 2: nn.init.normal_(p, std=0.02 / (math.sqrt(2 * L) if "o_proj" in k or "out_proj" in k or "down_proj" in k else 1))
    def forward(s, t, c, sn):
        x = s.embed_tokens(t)
        for b in s.layers: x = b(x, c, sn)
        return s.norm(x)
    def logits(s, x): return x @ s.embed_tokens.weight.to(x.dtype).t()

def config():
    return dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", tie_word_embeddings=True, max_position_embeddings=131072, **CFG)
def save(net, folder):
    from safetensors.torch import save_file
    keep = ("A_log", "dt_bias")                              # decay rates stay in single precision
    save_file({"model." + k: (v.float() if k.endswith(keep) else v.half()).contiguous().cpu() for k, v in net.state_dict().items()},
              os.path.join(folder, "hybrid.safetensors"))
    with open(os.path.join(folder, "config.json"), "w") as f: json.dump(config(), f, indent=1)
@torch.no_grad()
def check(net):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    other = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{k: v for k, v in config().items() if k not in ("architectures", "model_type")})).eval()
    for p in net.parameters(): p.add_(.05 * torch.randn_like(p))
    missing = other.load_state_dict({"model." + k: v for k, v in net.state_dict().items()}, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys, missing
    other.tie_weights(); net.eval(); t = torch.randint(0, V, (2, 150))
    a, b = net.logits(net(t, *rope(150, "cpu"))), other(t).logits
    print("relative difference from transformers", ((a - b).norm() / b.norm()).item())
def main():
    ap = argparse.ArgumentParser(); ap.add_argument("stages", nargs="+"); ap.add_argument("--text"); ap.add_argument("--out", default=".")
    ap.add_argument("--ckpt", default="hybrid.ckpt"); a = ap.parse_args(); torch.manual_seed(1)
    if a.stages == ["check"]: return check(Net())
    torch.set_float32_matmul_precision("high"); net = Net().to("cuda")
    if os.path.exists(a.ckpt): net.load_state_dict(torch.load(a.ckpt, map_location="cuda")); print("resumed")
    print("parameters", sum(p.numel() for p in net.parameters()), flush=True)
    for stage, minutes in zip(a.stages[::2], a.stages[1::2]):
        needle.train(net, rope, stage, float(minutes), a.text, "cuda", compiled=False)
        torch.save(net.state_dict(), a.ckpt); save(net, a.out)
    needle.evaluate(net, rope, a.text, "cuda", (2048, 8192, 32768, 131072))
if __name__ == "__main__": main()
