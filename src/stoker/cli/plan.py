"""`stoker plan`: measures this machine and predicts training speed and cost on several, given the network's rate."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.cli import parsing
from stoker.english import counted, duration
from stoker.errors import UserError
from stoker.plan.advice import Job, Row, accumulation, cost, epoch, machines_table, plan, table
from stoker.plan.cost_model import NO_COLLECTIVES, Collectives, Network, Node, Prediction
from stoker.plan.predicted_node import MachineRates, predict_node
from stoker.plan.sizes import SIZES
from stoker.plan.subject import TASKS, Subject, usual_task
from stoker.user_files import check_replaceable

__all__ = ["main", "node_counts"]

_LORA_R = 16
"""As in `stoker train sft`."""
_ROWS = 88_524
"""Of SQuAD, as windows of 384 tokens."""
_RATES = ("gflops", "bf16_gflops", "bandwidth")
"""Options that describe a node which is not there to be measured."""

_EXAMPLES = """examples:
  stoker plan --nodes 1..64 --network 10gbit
  stoker plan --nodes 1..16 --network 1gbit --model bert-large --batch 16 --price 0.68 --out plan.svg
  stoker plan --nodes 2,4,8 --network 25gbit --step 1.9 --parameters 109e6   for a step that was timed elsewhere
  stoker plan --model smollm2-135m --batch 8 --length 200 --rows 10000       a language model with LoRA adapters
  stoker plan --model llama-3.2-1b --full --cores 2,16,64                    predicted for machines of these sizes

src/stoker/plan/cost_model.py has the formula and its assumptions, docs/distributed.md how accurate it was.
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "plan", "predict training on several machines from measurements of this one", examples=_EXAMPLES
    )
    parser.add_argument("--nodes", metavar="A..B", help="or a list: 1,2,3 (1..16: 1, 2, 4, 8, 16; with --cores 1)")
    parser.add_argument("--network", default="10gbit", metavar="RATE", help="between the nodes: 1gbit, 10gbit, ...")
    parser.add_argument(
        "--latency", type=parsing.amount, metavar="US", help="microseconds per message (default: by the rate)"
    )
    parser.add_argument(
        "--model", default="bert-base", metavar="NAME", help=f"{', '.join(SIZES)}, a folder, or a name on the hub"
    )
    parser.add_argument("--task", choices=TASKS, help="the head of the model (sft for language models, qa for others)")
    parser.add_argument("--lora_r", type=parsing.count, metavar="N", help="rank of the adapters for --task sft (16)")
    parser.add_argument("--full", action="store_true", help="train all weights of a language model instead of adapters")
    parser.add_argument(
        "--labelled", type=parsing.amount, default=0.5, metavar="X", help="share of tokens trained on with sft (0.5)"
    )
    parser.add_argument("--batch", type=parsing.count, default=12, metavar="N", help="rows per node and step (12)")
    parser.add_argument(
        "--length", type=parsing.count, default=160, metavar="N", help="mean tokens per row (160, as in SQuAD)"
    )
    parser.add_argument(
        "--rows", type=parsing.many, default=_ROWS, metavar="N", help=f"rows of an epoch ({_ROWS:,}, as SQuAD has)"
    )
    parser.add_argument("--price", type=parsing.amount, metavar="X", help="price of one node per hour, in any currency")
    parser.add_argument("--processes", type=parsing.count, metavar="N", help="per node (default: the best of several)")
    parser.add_argument(
        "--step", type=parsing.amount, metavar="S", help="seconds of one node's step, instead of measuring it"
    )
    parser.add_argument("--parameters", type=parsing.amount, metavar="N", help="that are trained; with --step")
    parser.add_argument(
        "--cores",
        metavar="N,M",
        help="predict the step of nodes with so many cores from rates, instead of measuring it",
    )
    parser.add_argument(
        "--gflops", type=parsing.amount, metavar="X", help="of such a node in fp32 (default: as many per core as here)"
    )
    parser.add_argument(
        "--bf16_gflops", type=parsing.amount, metavar="X", help="the same in bf16: predicts training in bf16"
    )
    parser.add_argument("--bandwidth", type=parsing.amount, metavar="X", help="GB/s of its memory (default: by core)")
    parser.add_argument("--out", type=parsing.path, metavar="FILE", help="plot to a file: .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fresh", action="store_true", help="measure again instead of using stored measurements")
    options = parser.parse_args(argv)
    cores = _core_counts(options)
    counts = node_counts(options.nodes or ("1..16" if cores is None else "1"))
    latency = options.latency * 1e-6 if options.latency is not None else None
    network = Network.parse(options.network, latency)
    if (options.step is None) != (options.parameters is None):
        raise UserError("stoker plan: --step and --parameters must be given together")
    if options.step is not None and (options.step <= 0 or options.parameters < 1):
        raise UserError("stoker plan: --step and --parameters must be more than 0")
    if cores is not None and len(cores) > 1 and counts != [1]:
        raise UserError("stoker plan: with several numbers of --cores, leave out --nodes; or plan for one of them")
    drawn = _drawable(options.out) if options.out else None
    subject = _subject(options)
    if options.step is None:
        subject.check()
    job = Job(options.rows, options.batch, options.price)
    if cores is not None and counts == [1]:
        return _print_machines(options, subject, cores, job)
    node, summary = _node(options, subject, cores)
    rows = plan(node, network, counts, job)
    advice = _advice(node, rows, options)
    if options.json:
        print(json.dumps(_as_json(node, network, rows, advice, options, subject), indent=2))
    else:
        print("\n".join([*summary, _epoch(options)]))
        print(f"network: {network.gbit:g} Gbit/s, {network.latency * 1e6:.0f} us per message (assumed)\n")
        print(table(rows, options.price is not None))
        print()
        print("\n".join(advice))
    if drawn is not None:
        from stoker.plan.draw import draw

        try:
            draw(rows, f"{options.model}, {options.batch} rows per node, {network.gbit:g} Gbit/s", drawn)
        except OSError as error:
            raise UserError(f"--out {drawn} cannot be written: {error.strerror}") from None
        if not options.json:
            print(drawn)
    return 0


def _print_progress(line: str) -> None:
    print(f"stoker: {line}", file=sys.stderr)


def _core_counts(options: Any) -> list[int] | None:
    if options.cores is None:
        if any(vars(options)[name] is not None for name in _RATES):
            raise UserError(
                "stoker plan: --gflops, --bf16_gflops and --bandwidth describe a node whose number of --cores is given"
            )
        return None
    if not re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", options.cores):
        raise UserError(f"--cores {options.cores!r} is not a number or a list; write 16 or 2,16,64")
    found = sorted({int(part) for part in options.cores.split(",")})
    if not 1 <= found[0] <= found[-1] <= 4096:
        raise UserError(f"--cores {options.cores}: each number must be from 1 to 4096")
    for name in _RATES:
        if (value := vars(options)[name]) is not None and (len(found) > 1 or value <= 0):
            raise UserError(f"stoker plan: --{name} must be more than 0, and needs one number of --cores")
    if options.step is not None:
        raise UserError("stoker plan: --step is the time of a step, and --cores predicts it; give only one of them")
    if options.out is not None:
        raise UserError("stoker plan: --out draws measured nodes; leave it out with --cores")
    return found


def _subject(options: Any) -> Subject:
    if not 0 < options.labelled <= 1:
        raise UserError(f"--labelled is {options.labelled:g}; it must be above 0 and at most 1")
    task = options.task or (usual_task(options.model) if options.step is None else "qa")
    if task != "sft" and (options.full or options.lora_r):
        raise UserError(f"--full and --lora_r are for language models (--task sft), and the task is {task}")
    if options.full and options.lora_r:
        raise UserError("--lora_r is the rank of adapters, and with --full there are none; give only one of them")
    if task != "sft":
        return Subject(options.model, task, options.length)
    rank = 0 if options.full else options.lora_r or _LORA_R
    return Subject(options.model, task, options.length, rank, options.labelled)


def _node(options: Any, subject: Subject, cores: list[int] | None) -> tuple[Node, list[str]]:
    """The node to plan with, as given, as predicted or as the best measured, and lines that describe it."""
    from stoker.plan.link_rates import candidates, measure_collectives, measure_node, usable_cores

    collectives = measure_collectives(fresh=options.fresh, progress=_print_progress)
    between = f"between nodes: {collectives.summary()}"
    if options.step is not None:
        node = Node(step=options.step, processes=options.processes or 1, parameters=int(options.parameters),
                    collectives=collectives, cores=len(usable_cores()))  # fmt: skip
        return node, [f"node: {node.step:.3f} s per step (as given)", between]
    if cores is not None:
        machine, node = _predicted(options, subject, cores[0], collectives)
        return node, [*_described([node], subject, options), f"  predicted from {machine.summary()}", between]
    most = len(usable_cores())
    if options.processes and options.processes > min(most, options.batch):
        raise UserError(
            f"stoker plan: --processes is {options.processes}; it must be at most the number of cores ({most}) and of rows per "
            f"step (--batch {options.batch})"
        )
    nodes = [
        measure_node(subject, options.batch, processes, collectives, fresh=options.fresh, progress=_print_progress)
        for processes in ([options.processes] if options.processes else candidates(most))
        if processes <= options.batch
    ]
    best = min(nodes, key=lambda one: one.step)
    return best, [*_described(nodes, subject, options), between]


def _predicted(options: Any, subject: Subject, cores: int, collectives: Collectives) -> tuple[MachineRates, Node]:
    from stoker.hf.measured_rates import machine_rates

    machine = MachineRates.of(
        machine_rates(_print_progress), cores, options.gflops, options.bandwidth, options.bf16_gflops
    )
    return machine, predict_node(subject, options.batch, machine, collectives, options.processes)


def _described(nodes: Sequence[Node], subject: Subject, options: Any) -> list[str]:
    what = f"LoRA with rank {subject.lora_r}: " if subject.lora_r else ""
    millions = nodes[0].parameters / 1e6
    size = f"{millions:,.0f}" if millions >= 100 else f"{millions:.3g}"
    lines = [f"node: {what}{size} M trained parameters, {options.batch} rows of about {subject.length} tokens"]
    return lines + [
        f"  {counted(one.processes, 'process')} x {counted(int(one.cores // one.processes), 'core')}: {one.step:.3f} s per step"
        + (f", {one.tokens / one.step:,.0f} tokens/s, {one.memory / 1e9:.1f} GB" if one.tokens else "")
        for one in nodes
    ]


def _print_machines(options: Any, subject: Subject, cores: Sequence[int], job: Job) -> int:
    """A table, or JSON, of single machines with these numbers of cores."""
    found = [_predicted(options, subject, count, NO_COLLECTIVES) for count in cores]
    if options.json:
        machines = [
            {**_node_json(node), "gflops": machine.flops / 1e9, "bandwidth": machine.bytes / 1e9,
             "epoch": epoch(node.step, job, 1), "cost": cost(node.step, job, 1)}
            for machine, node in found
        ]  # fmt: skip
        print(json.dumps({"asked": _asked(options, subject), "machines": machines}, indent=2))
        return 0
    nodes = [node for _, node in found]
    print(_described(nodes, subject, options)[0])
    print(f"predicted from rates: {'; '.join(f'{one.cores} cores {one.summary()}' for one, _ in found)}")
    print(f"{_epoch(options)}\n")
    print(machines_table(nodes, job))
    return 0


def _epoch(options: Any) -> str:
    usual = ", as many as SQuAD has; --rows sets the number" if options.rows == _ROWS else ""
    return f"epoch: {options.rows:,} rows{usual}"


def _asked(options: Any, subject: Subject) -> dict[str, object]:
    asked = {name: vars(options)[name] for name in ("model", "batch", "length", "rows", "price")}
    return {**asked, "task": subject.task, "lora_r": subject.lora_r, "labelled": subject.labelled}


def _node_json(node: Node) -> dict[str, object]:
    names = ("step", "host", "processes", "cores", "parameters", "tokens", "memory")
    return {name: getattr(node, name) for name in names}


def _as_json(
    node: Node, network: Network, rows: list[Row], advice: list[str], options: Any, subject: Subject
) -> dict[str, object]:
    """All that the table says, and the flags of each number of nodes. Times in seconds."""

    def one(found: Prediction) -> dict[str, object]:
        return {"step": found.step, "efficiency": found.efficiency, "flags": found.setup.flags}

    return {
        "asked": _asked(options, subject),
        "node": _node_json(node),
        "network": {"gbit": network.gbit, "latency": network.latency},
        "nodes": [
            {"nodes": row.plain.nodes, "ddp_fp32": one(row.plain), "ddp_bf16": one(row.bf16), "local_sgd": one(row.local),
             "advised": one(row.advised), "tokens_per_second": row.plain.nodes * node.tokens / row.advised.step,
             "epoch": row.epoch, "cost": row.cost}
            for row in rows
        ],
        "advice": [line.strip() for line in advice],
    }  # fmt: skip


def _advice(node: Node, rows: list[Row], options: Any) -> list[str]:
    last, price = rows[-1], vars(options)["price"]
    advised, best = last.advised, min(rows, key=lambda row: row.epoch)
    lines = [f"advice: {counted(node.processes, 'process')} per node"]
    if advised.nodes > 1:
        lines[0] += f"; on {advised.nodes} nodes {advised.setup.label}"
        if not advised.setup.local_sgd:
            lines[0] += f", --ddp_bucket_cap_mb {advised.setup.bucket_mb}"
    if advised.setup.local_sgd:
        lines += _price_of_local_sgd(node, last, options)
    if best.epoch < rows[0].epoch:
        lines.append(f"  an epoch takes {duration(best.epoch)} on {best.advised.nodes} nodes"
                     f" instead of {duration(rows[0].epoch)} on {rows[0].advised.nodes}")  # fmt: skip
    if advised.nodes > 1 and advised.efficiency < 0.5:
        lines.append(
            f"  on {advised.nodes} nodes most of the time is waiting; a larger --batch or faster network helps"
        )
    if price is not None and best.cost is not None and rows[0].cost:
        lines.append(f"  and costs {best.cost:.2f} instead of {rows[0].cost:.2f}")
    if options.batch * advised.nodes > 512:
        lines.append(f"  the global batch is {options.batch * advised.nodes} rows: learning rate and warm-up need care")
    return lines


def _price_of_local_sgd(node: Node, row: Row, options: Any) -> list[str]:
    """What it costs to average weights instead of gradients, and what to do without it."""
    lines = [
        "  local SGD changes what is learned: all settings tried lowered the score of a short run (docs/distributed.md,",
        "  What local SGD costs). Average gradients first (--local_sgd_warmup_steps), and compare the score with and without it",
    ]
    if (found := accumulation(node, row)) is not None:
        count, prediction = found
        rows = options.batch * prediction.nodes * count
        flags = f"{prediction.setup.flags} --gradient_accumulation_steps {count}".strip()
        lines.append(
            f"  without it: {flags} keeps {prediction.efficiency:.0%}, with {rows} rows per step of the optimizer"
        )
    return lines


def node_counts(text: str) -> list[int]:
    """`1..64` -> 1, 2, 4, ..., 64; `3..20` -> 3, 6, 12, 20; `1,2,3` as it stands."""
    if match := re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})", text):
        first, last = int(match[1]), int(match[2])
        if not 1 <= first <= last <= 65536:
            raise UserError(f"--nodes {text}: both numbers must be from 1 to 65536, the smaller one first")
        found = [first]
        while found[-1] * 2 < last:
            found.append(found[-1] * 2)
        return found if found[-1] == last else [*found, last]
    if re.fullmatch(r"[0-9]{1,18}(,[0-9]{1,18})*", text) and all(1 <= int(part) <= 65536 for part in text.split(",")):
        return sorted({int(part) for part in text.split(",")})
    raise UserError(f"--nodes {text!r} is not a range or a list; write 1..64 or 1,2,4")


def _drawable(text: str) -> Path:
    check_replaceable(text, "--out")
    path = Path(text)
    if path.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise UserError(f"--out {text}: the name must end in .svg, .png or .pdf")
    if not path.resolve().parent.is_dir():
        raise UserError(f"--out {text}: there is no folder {path.resolve().parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError("--out needs matplotlib: pip install 'stoker[report]'") from None
    return path
