"""`stoker plan`: measures this machine and predicts training speed and cost on several, given the network's rate."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from stoker.cli import parsing
from stoker.english import counted, duration
from stoker.errors import UserError
from stoker.plan.advice import Job, Row, plan, table
from stoker.plan.cost_model import Network, Node, Prediction
from stoker.plan.subject import BUILT_IN, Subject
from stoker.user_files import check_replaceable

__all__ = ["main", "node_counts"]

_EXAMPLES = """examples:
  stoker plan --nodes 1..64 --network 10gbit
  stoker plan --nodes 1..16 --network 1gbit --model bert-large --batch 16 --price 0.68 --out plan.svg
  stoker plan --nodes 2,4,8 --network 25gbit --step 1.9 --parameters 109e6   for a machine that is not this one

src/stoker/plan/cost_model.py has the formula and its assumptions, docs/distributed.md how accurate it was.
"""


def main(argv: list[str]) -> int:
    parser = parsing.Parser(
        "plan", "predict training on several machines from measurements of this one", examples=_EXAMPLES
    )
    parser.add_argument("--nodes", default="1..16", metavar="A..B", help="or a list: 1,2,3 (1..16: 1, 2, 4, 8, 16)")
    parser.add_argument("--network", default="10gbit", metavar="RATE", help="between the nodes: 1gbit, 10gbit, ...")
    parser.add_argument(
        "--latency", type=parsing.amount, metavar="US", help="microseconds per message (default: by the rate)"
    )
    parser.add_argument(
        "--model", default="bert-base", metavar="NAME", help=f"{', '.join(BUILT_IN)}, a folder, or a name on the hub"
    )
    parser.add_argument("--task", default="qa", choices=("qa", "classify"), help="the head of the model")
    parser.add_argument("--batch", type=parsing.count, default=12, metavar="N", help="rows per node and step (12)")
    parser.add_argument(
        "--length", type=parsing.count, default=160, metavar="N", help="mean tokens per row (160, as in SQuAD)"
    )
    parser.add_argument(
        "--rows", type=parsing.many, default=88_524, metavar="N", help="rows of an epoch (88,524, as SQuAD has)"
    )
    parser.add_argument("--price", type=parsing.amount, metavar="X", help="price of one node per hour, in any currency")
    parser.add_argument("--processes", type=parsing.count, metavar="N", help="per node (default: the best of several)")
    parser.add_argument(
        "--step", type=parsing.amount, metavar="S", help="seconds of one node's step, instead of measuring it"
    )
    parser.add_argument("--parameters", type=parsing.amount, metavar="N", help="of the model; with --step")
    parser.add_argument("--out", type=parsing.path, metavar="FILE", help="plot to a file: .svg, .png or .pdf")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--fresh", action="store_true", help="measure again instead of using stored measurements")
    options = parser.parse_args(argv)
    counts = node_counts(options.nodes)
    latency = options.latency * 1e-6 if options.latency is not None else None
    network = Network.parse(options.network, latency)
    if (options.step is None) != (options.parameters is None):
        raise UserError("stoker plan: --step and --parameters must be given together")
    if options.step is not None and (options.step <= 0 or options.parameters < 1):
        raise UserError("stoker plan: --step and --parameters must be more than 0")
    drawn = _drawable(options.out) if options.out else None
    subject = Subject(options.model, options.task, options.length)
    if options.step is None:
        subject.check()
    node, summary = _node(options, subject)
    job = Job(options.rows, options.batch, options.price)
    rows = plan(node, network, counts, job)
    advice = _advice(node, rows, options)
    if options.json:
        print(json.dumps(_as_json(node, network, rows, advice, options), indent=2))
    else:
        print("\n".join(summary))
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


def _node(options: object, subject: Subject) -> tuple[Node, list[str]]:
    """The node to plan with, as given or as the best measured, and lines that describe it."""
    from stoker.plan.link_rates import candidates, measure_collectives, measure_node, usable_cores

    given = vars(options)
    collectives = measure_collectives(fresh=given["fresh"], progress=_print_progress)
    cores = len(usable_cores())
    between = f"between nodes: {collectives.summary()}"
    if given["step"] is not None:
        processes = given["processes"] or 1
        node = Node(step=given["step"], processes=processes, parameters=int(given["parameters"]),
                    collectives=collectives, cores=cores)  # fmt: skip
        return node, [f"node: {node.step:.3f} s per step (as given)", between]
    tried = [given["processes"]] if given["processes"] else candidates(cores)
    for processes in tried:
        if processes > cores or processes > given["batch"]:
            raise UserError(
                f"stoker plan: --processes is {processes}; it must be at most the number of cores ({cores}) and of rows per "
                f"step (--batch {given['batch']})"
            )
    nodes = [
        measure_node(subject, given["batch"], processes, collectives, fresh=given["fresh"], progress=_print_progress)
        for processes in tried
        if processes <= given["batch"]
    ]
    best = min(nodes, key=lambda one: one.step)
    lines = [f"node: {best.parameters / 1e6:.0f} M parameters, {given['batch']} rows of about {subject.length} tokens"]
    lines += [
        f"  {counted(one.processes, 'process')} x {counted(one.cores // one.processes, 'core')}: {one.step:.3f} s per step"
        for one in nodes
    ]
    return best, [*lines, between]


def _as_json(node: Node, network: Network, rows: list[Row], advice: list[str], options: object) -> dict[str, object]:
    """All that the table says, and the flags of each number of nodes. Times in seconds."""

    def one(found: Prediction) -> dict[str, object]:
        return {"step": found.step, "efficiency": found.efficiency, "flags": found.setup.flags}

    return {
        "asked": {name: vars(options)[name] for name in ("model", "task", "batch", "length", "rows", "price")},
        "node": {"step": node.step, "processes": node.processes, "cores": node.cores, "parameters": node.parameters},
        "network": {"gbit": network.gbit, "latency": network.latency},
        "nodes": [
            {"nodes": row.plain.nodes, "ddp_fp32": one(row.plain), "ddp_bf16": one(row.bf16), "local_sgd": one(row.local),
             "advised": one(row.advised), "epoch": row.epoch, "cost": row.cost}
            for row in rows
        ],
        "advice": [line.strip() for line in advice],
    }  # fmt: skip


def _advice(node: Node, rows: list[Row], options: object) -> list[str]:
    last, price = rows[-1], vars(options)["price"]
    advised, best = last.advised, min(rows, key=lambda row: row.epoch)
    lines = [f"advice: {counted(node.processes, 'process')} per node"]
    if advised.nodes > 1:
        lines[0] += f"; on {advised.nodes} nodes {advised.setup.label}"
        if not advised.setup.local_sgd:
            lines[0] += f", --ddp_bucket_cap_mb {advised.setup.bucket_mb}"
    if advised.setup.local_sgd:
        lines.append("  local SGD changes what is learned: compare the score after a short run with and without it")
    if best.epoch < rows[0].epoch:
        lines.append(f"  an epoch takes {duration(best.epoch)} on {best.advised.nodes} nodes"
                     f" instead of {duration(rows[0].epoch)} on {rows[0].advised.nodes}")  # fmt: skip
    if advised.nodes > 1 and advised.efficiency < 0.5:
        lines.append(
            f"  on {advised.nodes} nodes most of the time is waiting; a larger --batch or faster network helps"
        )
    if price is not None and best.cost is not None and rows[0].cost:
        lines.append(f"  and costs {best.cost:.2f} instead of {rows[0].cost:.2f}")
    if vars(options)["batch"] * advised.nodes > 512:
        lines.append(
            f"  the global batch is {vars(options)['batch'] * advised.nodes} rows: learning rate and warm-up need care"
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
