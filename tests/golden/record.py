"""Records what Hugging Face transformers computes for a GGUF model: `python -m tests.golden.record smollm2 model.gguf`.

Writes smollm2.json or gemma3.json beside this file, for `tests/test_golden.py` to compare with. Needs torch, transformers,
gguf and accelerate. Logits are rounded to six significant digits.
"""

import argparse
import hashlib
import json
import pathlib

import torch
import transformers

HERE = pathlib.Path(__file__).parent
POSITIONS = {
    "smollm2": [0, 1, 2, 7, 23, 48, 80, 121, 170, 222, 271, 299],
    "gemma3": [0, 1, 2, 23, 80, 170, 300, 511, 512, 513, 555, 599],
}
PROMPTS = [
    "The capital of France is",
    "What is the difference between a lake and a river?",
    'def is_prime(n):\n    """Return True if n is a prime number."""\n'
    "    if n < 2:\n        return False\n    for i in range(2,",
    "Ibu kota Indonesia adalah Jakarta. Kota terbesar kedua adalah",
]
NEW_TOKENS = 64


def load(path):
    """Returns the tokenizer and the float32 model of a GGUF file; the model generates past end tokens."""
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    return tokenizer, model.eval()


def uncached_logits(model, ids):
    """Returns the logits [T, V] of one forward pass over all ids."""
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


def greedy(model, ids):
    """Returns the ids of the greedy continuation, and the smallest lead of a chosen token over the next best."""
    prompt = torch.tensor([ids])
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(made.logits).topk(2).values
    return made.sequences[0, len(ids) :].tolist(), (best[:, 0] - best[:, 1]).min().item()


def six_digits(values):
    """Returns a tensor as nested lists of numbers of six significant digits."""
    if values.ndim:
        return [six_digits(row) for row in values]
    return float(f"{values.item():.6g}")


def measurements(name, tokenizer, model):
    """Returns everything the JSON file holds except where it came from."""
    positions = POSITIONS[name]
    text = (HERE / "text.txt").read_text(encoding="utf-8")
    ids = tokenizer(text).input_ids[: positions[-1] + 1]
    logits = uncached_logits(model, ids)
    chosen = logits[positions]
    top = chosen.topk(8)
    probe_ids = torch.linspace(0, logits.shape[1] - 1, 24, dtype=torch.float64).long()
    greedy_runs = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer(prompt).input_ids
        new_ids, margin = greedy(model, prompt_ids)
        greedy_runs.append({"prompt": prompt, "prompt_ids": prompt_ids, "ids": new_ids, "smallest_margin": margin})
    return {
        "ids": ids,
        "nll": torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])).item(),
        "positions": positions,
        "logsumexp": six_digits(chosen.double().logsumexp(-1)),
        "top_ids": top.indices.tolist(),
        "top_logits": six_digits(top.values),
        "probe_ids": probe_ids.tolist(),
        "probe_logits": six_digits(chosen[:, probe_ids]),
        "greedy": greedy_runs,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=POSITIONS)
    parser.add_argument("gguf", type=pathlib.Path)
    arguments = parser.parse_args()
    with arguments.gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    record = {
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "file": arguments.gguf.name,
        "sha256": digest,
        **measurements(arguments.name, *load(arguments.gguf)),
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in record.items())
    (HERE / f"{arguments.name}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
