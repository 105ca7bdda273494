"""The command line: `gqa-jax generate` writes text, `info` says what a checkpoint is, `plan` what it needs and what fits."""

import argparse
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

DEFAULT_MODEL = "smollm2-135m"
DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0 when it was done, 1 when it failed, 2 for misuse, 130 when interrupted."""
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # A terminal without some letters must not lose the text.
    options = _parser().parse_args(arguments)
    from gqa_jax.download import DownloadError

    try:
        options.command(options)
    except (ValueError, TypeError) as error:
        print(f"gqa-jax: {error}", file=sys.stderr)
        return 2
    except (DownloadError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError is XLA's: no device, no memory
        if isinstance(error, BrokenPipeError):
            # Whoever read our output has had enough; the interpreter must not try to flush it once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        print(f"gqa-jax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngqa-jax: interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gqa-jax", description="Grouped-query attention on real checkpoints.")
    parser.add_argument("--version", action="version", version=f"gqa-jax {importlib.metadata.version('gqa-jax')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    write = commands.add_parser("generate", help="continue prompts", description="Continues each prompt.")
    write.set_defaults(command=_generate)
    write.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue; several are one batch")
    _add_model(write, "--model", default=DEFAULT_MODEL)
    write.add_argument("--max-new-tokens", type=_count, default=64, metavar="N", help="tokens to add at the most (%(default)s)")
    write.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (%(default)s)")
    write.add_argument("--top-k", type=_count, metavar="N", help="draw from the N likeliest tokens")
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
    write.add_argument("--capacity", type=_count, metavar="N", help="room for N tokens in each row of the cache")
    write.add_argument("--cache-dtype", choices=DTYPES, help="dtype of the cache (that of the weights)")
    _add_dtype(write)
    many = write.add_argument_group("on many devices")
    _add_mesh(many, None, "1; with --distributed all there are")
    many.add_argument("--distributed", action="store_true", help="join the other processes of the job; process 0 prints")
    many.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where no cluster says it")
    many.add_argument("--num-processes", type=_count, metavar="N", help="likewise")
    many.add_argument("--process-id", type=int, metavar="N", help="likewise, from 0 on")
    many.add_argument("--timeout", type=_count, metavar="S", help="seconds to wait for the other processes (120)")

    about = commands.add_parser("info", help="say what a checkpoint is", description="Says what a checkpoint is.")
    about.set_defaults(command=_info)
    _add_model(about, "model", nargs="?", default=DEFAULT_MODEL)
    _add_dtype(about)

    _add_plan(commands.add_parser("plan", help="say what fits", description="Says what a context takes and what fits."))
    return parser


def _add_plan(what: argparse.ArgumentParser) -> None:
    what.set_defaults(command=_plan)
    what.add_argument("model", nargs="?", metavar="MODEL", help="as for generate; only its header is read")
    shape = what.add_argument_group("instead of MODEL")
    for name, help in {
        "--layers": "layers",
        "--heads": "query heads",
        "--kv-heads": "KV heads",
        "--head-dim": "width of a head",
        "--kv-lora-rank": "of MLA, in place of --kv-heads and --head-dim (with them: for the comparison)",
        "--rope-dim": "the rotary part of MLA's latent",
    }.items():
        shape.add_argument(name, type=_count, metavar="N", help=help)
    shape.add_argument("--parameters", metavar="N", help="weights, such as 8e9 or 8B (without: the cache alone)")
    what.add_argument("--context", metavar="N", help="tokens a row, such as 128k (131072) or 1000000 (that of MODEL)")
    what.add_argument("--batch", type=_count, default=1, metavar="N", help="rows, of all devices together (%(default)s)")
    _add_mesh(what, 1, "1")
    kinds = (*DTYPES, "fp8", "int8", "int4")
    what.add_argument("--cache-dtype", choices=kinds, help="dtype of the cache (that of the weights); scales are not counted")
    what.add_argument("--device", metavar="NAME", help="h200, v5e, ...; a name that is not known lists all")
    what.add_argument("--memory", metavar="SIZE", help="instead: bytes of a device, such as 80GB or 80GiB")
    what.add_argument("--plot", metavar="FILE", help="draw bytes against context (.png, .svg, .pdf)")
    _add_dtype(what)


def _add_model(parser: argparse.ArgumentParser, name: str, **how: Any) -> None:
    parser.add_argument(
        name,
        metavar="MODEL",
        help="a GGUF file, a folder in Hugging Face layout, smollm2-135m or gemma3-270m, or org/name of the Hub (%(default)s)",
        **how,
    )


def _add_mesh(parser: Any, tp: int | None, said: str) -> None:
    parser.add_argument("--tp", type=_count, default=tp, metavar="N", help=f"devices that share the weights ({said})")
    parser.add_argument(
        "--data", type=_count, default=1, metavar="N", help="copies of them, for parts of the batch (%(default)s)"
    )
    parser.add_argument(
        "--policy",
        choices=("replicate", "split", "reject"),
        default="replicate",
        help="where devices share a KV head: copy its cache, split its slots, or refuse (%(default)s)",
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (as stored; float32 for quantised files)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON and nothing else")


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _generate(options: argparse.Namespace) -> None:
    import jax

    import gqa_jax
    from gqa_jax.sampling import sampling

    _join(options)
    jax.devices()  # Refuses a platform that is not there, before anything is fetched or loaded.
    draw = {name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    sampling(1, **draw)  # Refuses wrong numbers before anything is fetched or loaded.
    tp = options.tp or (len(jax.devices()) // options.data if options.distributed else 1)
    mesh = partial(gqa_jax.make_mesh, tp=tp, data=options.data, policy=options.policy) if tp * options.data > 1 else None
    with _bars(options.json or jax.process_index() > 0) as progress:
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
    held = f" on {stats.devices} devices, {_bytes(stats.cache_bytes_per_device)} each" if stats.devices > 1 else ""
    return (
        f"prompt {stats.prompt_tokens} tokens, {stats.prompt_tokens / stats.prompt_seconds:.1f} tokens/s · "
        f"decode {stats.new_tokens} tokens, {stats.new_tokens / stats.decode_seconds:.1f} tokens/s · "
        f"cache {_bytes(stats.cache_bytes)}{held} · temporary {_bytes(stats.temporary_bytes)} · "
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


def _info(options: argparse.Namespace) -> None:
    path, config, dtype = _look(options)
    facts = _facts(config, dtype)
    if options.json:
        print(json.dumps({"model": options.model, "path": str(path), **facts}))
        return
    table = Table(title=f"{options.model}  ({path})", show_header=False, title_justify="left")
    for name, value in facts.items():
        shown = _bytes(value) if name.endswith("_bytes") else _heads(value) if name == "query_heads_by_kv_head" else str(value)
        table.add_row(name.replace("_", " "), shown)
    Console(soft_wrap=True).print(table)


def _look(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """Returns where a model lies, its config, and the dtype that its weights will have; reads no weights."""
    from gqa_jax import checkpoint, families

    with _bars(options.json) as progress:
        path = checkpoint.locate(options.model, progress)
        archive = checkpoint.open_archive(path)
    family = families.family_of(archive)
    config = family.config(archive)
    return path, config, options.dtype or checkpoint.stored_dtype(archive, family, config).name


def _facts(config: Any, dtype: str) -> dict[str, Any]:
    import jax
    import numpy as np

    from gqa_jax import cache, decoder

    weights = jax.tree.leaves(decoder.param_shapes(config, dtype))
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jax.numpy.dtype(dtype).itemsize
    hows = [config.layer_attention(layer) for layer in range(config.num_layers)]
    slots = sum(cache.num_slots(config.context_length, how.window) for how in hows)
    groups = np.arange(config.num_heads).reshape(config.num_kv_heads, config.group_size)
    return {
        "kind": config.kind,
        "layers": config.num_layers,
        "query_heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_width": config.head_dim,
        "query_heads_by_kv_head": groups.tolist(),
        "model_width": config.model_dim,
        "mlp_width": config.mlp_dim,
        "vocabulary": config.vocab_size,
        "context": config.context_length,
        "window": next((how.window for how in hows if how.window), None),
        "window_layers": [layer for layer, how in enumerate(hows) if how.window],
        "parameters": sum(leaf.size for leaf in weights),
        "dtype": dtype,
        "weight_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in weights),
        "cache_bytes_per_token": per_token,
        "full_context_cache_bytes": per_token * slots // config.num_layers,
    }


def _heads(groups: list[list[int]]) -> str:
    spans = (f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)
    return ", ".join(f"{span} read KV head {head}" for head, span in enumerate(spans))


def _bytes(count: int) -> str:
    """Gives bytes exactly and in decimal and binary units."""
    decimal, binary = float(count), float(count)
    for unit, other in (("B", "B"), ("kB", "KiB"), ("MB", "MiB"), ("GB", "GiB"), ("TB", "TiB")):
        if decimal < 1000 or unit == "TB":
            return f"{count} B" if unit == "B" else f"{decimal:.1f} {unit} ({binary:.1f} {other})"
        decimal, binary = decimal / 1000, binary / 1024
    raise AssertionError


def _plan(options: argparse.Namespace) -> None:
    from gqa_jax import devices, planner

    device = devices.device_of(options.device, options.memory)
    latent, parameters, context = _check_shape(options), None, None
    if options.parameters is not None:
        parameters = devices.amount("number of parameters", options.parameters, devices.PARAMETERS, "8e9 or 8B")
    if options.context is not None:
        context = devices.amount("context", options.context, devices.TOKENS, "1000000 or 128k (k is 1024, M 1024 k)")
    if options.model is None:
        dtype = options.dtype or "bfloat16"
        kv_heads, width = options.kv_heads or options.heads, options.head_dim or latent or 0
        config = planner.heads_only(options.layers, options.heads, kv_heads, width)
    else:
        _, config, dtype = _look(options)
    plan = planner.Plan(
        config,
        context=context or config.context_length,
        cache_dtype=options.cache_dtype or dtype,
        weight_dtype=dtype if options.model or parameters else None,
        parameters=parameters,
        latent=latent,
        device=device,
        **{name: getattr(options, name) for name in ("batch", "tp", "data", "policy")},
    )
    versions = planner.side_by_side(plan) if options.model or options.head_dim else {"MLA": plan}
    if options.plot:
        planner.plot(plan, versions, options.plot)
    if options.json:
        beside = {name: {"cache_bytes": other.cache_bytes, "cards": other.cards} for name, other in versions.items()}
        print(json.dumps({"model": options.model, **plan.facts(), "side_by_side": beside}))
        return
    print(planner.report(plan, versions))
    if options.model and plan.context > config.context_length:
        print(f"{options.model} is made for {config.context_length:,} tokens; generate takes no more.")


def _check_shape(options: argparse.Namespace) -> int | None:
    """Refuses a MODEL with a shape beside it, and a shape that lacks a number; returns the latent of MLA."""
    model, heads, mla = ("layers", "heads"), ("kv_heads", "head_dim"), ("kv_lora_rank", "rope_dim")

    def flags(*names: str) -> str:
        return ", ".join(f"--{name.replace('_', '-')}" for name in names)

    given = {name for name in (*model, *heads, *mla, "parameters") if getattr(options, name) is not None}
    if options.model is not None:
        if given:
            raise ValueError(f"{options.model} has its own numbers; leave it out, or {flags(*sorted(given))}.")
        return None
    needed = (*model, *(mla if given & {*mla} else heads), *(("head_dim",) if "kv_heads" in given else ()), "context")
    missing = [name for name in dict.fromkeys(needed) if getattr(options, name) is None]
    if missing:
        raise ValueError(
            f"Missing: {flags(*missing)}. Give a MODEL, or {flags(*model, *heads)} (MLA: {flags(*model, *mla)}) and --context."
        )
    return options.kv_lora_rank + options.rope_dim if given & {*mla} else None


@contextmanager
def _bars(quiet: bool) -> Iterator[Any]:
    """Shows a bar for each long piece of work, on a terminal only, and takes them away at the end."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield progress


if __name__ == "__main__":
    sys.exit(main())
