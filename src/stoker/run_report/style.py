"""The report's style sheet: light and dark, for phones and wide screens; it loads no files."""

from __future__ import annotations

__all__ = ["CSS", "LIVE_CSS"]

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f5f2; --card: #ffffff; --ink: #1d1f24; --muted: #6a6f7a; --grid: #e4e2dc; --line: #e4e2dc;
  --one: #0b6bcb; --two: #c2571a; --three: #18794e; --four: #7c4dbd; --five: #8a8f99;
  --good: #18794e; --bad: #b3261e; --mark: #fff0b8; --markbad: #ffd9d4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14161a; --card: #1c1f25; --ink: #e8e6e1; --muted: #9aa0ab; --grid: #30343c; --line: #2b2f37;
    --one: #6cb2ff; --two: #ff9d5c; --three: #5ccf97; --four: #bd9bff; --five: #7d838e;
    --good: #5ccf97; --bad: #ff8a80; --mark: #54470f; --markbad: #5c2420;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "Noto Sans", "Helvetica Neue", Arial, sans-serif; font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
main { max-width: 1120px; margin: 0 auto; padding: clamp(20px, 4vw, 56px) clamp(16px, 4vw, 40px) 72px; }
header { margin-bottom: 28px; }
h1 { font-size: clamp(1.6rem, 4.5vw, 2.5rem); line-height: 1.12; letter-spacing: -0.02em; margin: 0 0 10px; font-weight: 680; }
h2 { font-size: 1.15rem; margin: 44px 0 14px; letter-spacing: -0.005em; font-weight: 640; }
.sub { color: var(--muted); margin: 0; }
.pill { display: inline-block; font-size: .8rem; font-weight: 600; padding: 2px 11px; border-radius: 99px;
  border: 1px solid currentColor; margin-right: 10px; }
.pill.good { color: var(--good); } .pill.bad { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(max(132px, 25% - 12px), 1fr)); gap: 12px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 14px; }
.tile { padding: 16px 18px; }
.tile b { display: block; font-size: 1.6rem; line-height: 1.15; letter-spacing: -0.02em; font-weight: 660; }
.tile span { color: var(--muted); font-size: .87rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 330px), 1fr)); gap: 14px; }
figure { margin: 0; padding: 16px 16px 10px; min-width: 0; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { color: var(--muted); font-size: .87rem; margin: 6px 2px 4px; }
.card { padding: 6px 18px; }
table { border-collapse: collapse; width: 100%; font-size: .94rem; }
td, th { text-align: left; padding: 8px 12px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; font-weight: 400; }
tr:last-child td, tr:last-child th { border-bottom: 0; }
th { color: var(--muted); width: 34%; }
td.count { text-align: right; width: 4em; padding-right: 0; }
.examples { columns: 3 310px; column-gap: 14px; }
.example { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--line); border-radius: 10px;
  padding: 14px 18px; font-size: .94rem; margin-bottom: 14px; break-inside: avoid; }
.example.right { border-left-color: var(--good); } .example.wrong { border-left-color: var(--bad); }
.example p { margin: 0 0 8px; } .example .q { font-weight: 620; } .example .text { color: var(--muted); }
.example .given { margin: 0; } .example .turn { white-space: pre-line; }
mark { background: var(--mark); color: inherit; border-radius: 4px; padding: 0 3px; }
mark.wrong { background: var(--markbad); }
mark small { color: var(--muted); margin-left: 5px; font-size: .78em; }
.scroll { overflow-x: auto; } .note { font-size: .87rem; margin: 4px 0 10px; }
.figures th, .figures td { width: auto; overflow-wrap: normal; } .figures td, .figures tr:first-child th { text-align: right; }
.figures th:first-child { text-align: left; }
pre { white-space: pre-wrap; background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 18px;
  font: .86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; margin: 0; }
details { margin-top: 14px; } summary { cursor: pointer; color: var(--muted); }
footer { margin-top: 56px; color: var(--muted); font-size: .87rem; }
@media (max-width: 480px) {
  body { font-size: 15px; } h1 { font-size: 1.45rem; } .tiles { grid-template-columns: 1fr 1fr; } .tile b { font-size: 1.4rem; }
  figure { padding: 12px 8px 8px; } th { width: 40%; }
}
@media print { body { background: #fff; } .tile, figure, .example, .card { break-inside: avoid; } }
"""

LIVE_CSS = """
.pill.busy { color: var(--one); } .pill.idle { color: var(--muted); }
.pill.busy::before { content: ""; display: inline-block; width: .55em; height: .55em; border-radius: 50%;
  background: currentColor; margin-right: .5em; animation: beat 1.6s ease-in-out infinite; }
@keyframes beat { 50% { opacity: .25; } }
@media (prefers-reduced-motion: reduce) { .pill.busy::before { animation: none; } }
progress { appearance: none; display: block; width: 100%; height: 6px; margin-top: 18px; border: 0; border-radius: 99px;
  background: var(--line); overflow: hidden; }
progress::-webkit-progress-bar { background: var(--line); }
progress::-webkit-progress-value { background: var(--one); border-radius: 99px; }
progress::-moz-progress-bar { background: var(--one); }
#connection.lost { color: var(--bad); }
.chart text { font-size: 11px; fill: var(--muted); font-family: inherit; }
.chart .value { fill: var(--ink); } .chart .end { text-anchor: end; } .chart .middle { text-anchor: middle; }
.chart .grid { stroke: var(--grid); stroke-width: .8; } .chart .mark { stroke: var(--muted); stroke-dasharray: 2 3; }
.chart path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart path.faint { stroke-width: 1; opacity: .35; }
.chart .hover { stroke: var(--muted); stroke-width: 1; }
.chart path.one { stroke: var(--one); } .chart path.two { stroke: var(--two); } .chart path.three { stroke: var(--three); }
.chart path.four { stroke: var(--four); } .chart path.five { stroke: var(--five); }
.chart :is(rect, circle, text).one { fill: var(--one); } .chart :is(rect, circle, text).two { fill: var(--two); }
.chart :is(rect, circle, text).three { fill: var(--three); } .chart :is(rect, circle, text).four { fill: var(--four); }
.chart :is(rect, circle, text).five { fill: var(--five); }
.runs .pill { margin: 0; white-space: nowrap; } .runs td { white-space: nowrap; } .runs tr:first-child th { white-space: nowrap; }
.runs td, .runs tr:first-child th { padding: 8px 14px 8px 0; } .runs th:first-child { white-space: nowrap; color: var(--ink); }
.runs :is(th, td):nth-child(2), .runs tr:first-child th:first-child { text-align: left; }
.swatch { width: 24px; height: 6px; margin-right: 9px; vertical-align: middle; stroke-width: 3; stroke-linecap: round; }
"""
"""What the live page and the comparison of runs have besides: the state of a run, and charts that a script draws."""
