"""`gqa-jax generate`: continues prompts, on one device or many."""

import argparse
import json
import os
import sys
from functools import partial
from typing import Any

from gqa_jax.commands.terminal import DEFAULT_MODEL, DTYPES, add_dtype, add_mesh, add_model, bars, count, in_units


def add(commands: Any) -> None:
    """Declares the command and its arguments."""
    write = commands.add_parser("generate", help="continue prompts", description="Continues each prompt.")
    write.set_defaults(command=run)
    write.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue; several are one batch")
    add_model(write, "--model", default=DEFAULT_MODEL)
    write.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="tokens to add at the most (%(default)s)")
    write.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (%(default)s)")
    write.add_argument("--top-k", type=count, metavar="N", help="draw from the N likeliest tokens")
    write.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest that hold P of the chance"
    )
    write.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="draw from those P times as likely as the likeliest"
    )
    write.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: repeat less")
    write.add_argument("--seed", type=int, default=0, help="the same seed draws the same text (%(default)s)")
    write.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    write.add_argument("--no-cache", action="store_true", help="compute everything anew for every token, for comparison")
    write.add_argument("--capacity", type=count, metavar="N", help="room for N tokens in each row of the cache")
    write.add_argument("--cache-dtype", choices=DTYPES, help="dtype of the cache (that of the weights)")
    add_dtype(write)
    many = write.add_argument_group("on many devices")
    add_mesh(many, None, "1; with --distributed all there are")
    many.add_argument("--distributed", action="store_true", help="join the other processes of the job; process 0 prints")
    many.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where no cluster says it")
    many.add_argument("--num-processes", type=count, metavar="N", help="likewise")
    many.add_argument("--process-id", type=int, metavar="N", help="likewise, from 0 on")
    many.add_argument("--timeout", type=count, metavar="S", help="seconds to wait for the other processes (120)")


def run(options: argparse.Namespace) -> None:
    """Runs the command."""
    import jax

    import gqa_jax
    from gqa_jax.sampling import sampling

    _join(options)
    jax.devices()  # Refuses a platform that is not there, before anything is fetched or loaded.
    draw = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    sampling(1, **draw)  # Refuses wrong numbers before anything is fetched or loaded.
    tp = options.tp or (len(jax.devices()) // options.data if options.distributed else 1)
    mesh = partial(gqa_jax.make_mesh, tp=tp, data=options.data, policy=options.policy) if tp * options.data > 1 else None
    with bars(options.json or jax.process_index() > 0) as progress:
        model = gqa_jax.load(options.model, dtype=options.dtype, mesh=mesh, progress=progress)
        how = draw | {
            "max_new_tokens": options.max_new_tokens,
            "seed": options.seed,
            "use_cache": not options.no_cache,
            "capacity": options.capacity,
            "cache_dtype": options.cache_dtype,
            "progress": progress,
        }
        prompts = [_prompt(model, text, options.chat) for text in options.prompts]
        if options.json or len(prompts) > 1:
            generation = gqa_jax.generate(model, prompts, **how)
        else:
            stream = gqa_jax.generate(model, prompts, stream=True, **how)
            first = next(stream, "")
    if options.json:
        _print_json(options, generation)
        return
    if len(prompts) == 1:
        print("" if options.chat else options.prompts[0], first, sep="", end="", flush=True)
        for piece in stream:
            print(piece, end="", flush=True)
        print()
        generation = stream.generation
    else:
        for prompt, text in zip(options.prompts, generation.text, strict=True):
            print(f"> {prompt}\n{text}\n" if options.chat else f"{prompt}{text}\n")
    print(_summary(generation.stats))


def _join(options: argparse.Namespace) -> None:
    """Makes the devices that are asked for, of this process or of all of them; only process 0 has an output."""
    import jax

    devices = options.data * (options.tp or 1) // (options.num_processes or 1)
    if devices > 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", devices)  # Counts only where the CPU is all there is.
    named = [name for name in ("coordinator", "num_processes", "process_id", "timeout") if getattr(options, name) is not None]
    if not options.distributed:
        if named:
            raise ValueError(f"--{named[0].replace('_', '-')} needs --distributed.")
        return
    from gqa_jax import distributed

    # Native libraries speak on the standard output; they shall speak on the other.
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    distributed.join(options.coordinator, options.num_processes, options.process_id, options.timeout or 120)
    distributed.check_same({k: v for k, v in vars(options).items() if k not in ("process_id", "command", "timeout")})
    sys.stdout = os.fdopen(output if jax.process_index() == 0 else os.open(os.devnull, os.O_WRONLY), "w", errors="replace")


def _prompt(model: Any, text: str, chat: bool) -> str:
    if not chat:
        return text
    if model.tokenizer is None:
        raise ValueError("The model has no tokenizer, and so no chat template.")
    return model.tokenizer.chat([{"role": "user", "content": text}])


def _summary(stats: Any) -> str:
    held = f" on {stats.devices} devices, {in_units(stats.cache_bytes_per_device)} each" if stats.devices > 1 else ""
    return (
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_tokens / stats.prompt_seconds:.1f} tokens/s · "
        f"decode {stats.new_tokens} tokens, {stats.new_tokens / stats.decode_seconds:.1f} tokens/s · "
        f"cache {in_units(stats.cache_bytes)}{held} · temporary {in_units(stats.temporary_bytes)} · "
        f"compiled in {stats.compile_seconds:.1f} s"
    )


def _print_json(options: argparse.Namespace, generation: Any) -> None:
    stats = generation.stats
    result = {
        "model": options.model,
        "prompts": options.prompts,
        "text": generation.text,
        "ids": generation.ids,
        "stop_reason": generation.stop_reason,
        **stats._asdict(),
        "prompt_tokens_per_second": stats.prompt_tokens / stats.prompt_seconds,
        "decode_tokens_per_second": stats.new_tokens / stats.decode_seconds,
    }
    print(json.dumps(result, ensure_ascii=False))
