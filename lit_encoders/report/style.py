"""The style of a page: light and dark, from a phone to a desk."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #667; --paper: #fff; --rule: #d8dce2; --band: #eff2f6;
  --band2: #d5deea; --c0: #0067b1; --c1: #cf5200; --c2: #00875f; --c3: #b6509a; --c4: #a97800; --c5: #3b9fd6;
  --c6: #6b6b6b; --c7: #8a4a3c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --faint: #9aa3af; --paper: #15181c; --rule: #353b44;
  --band: #1f242b; --band2: #303a47; --c0: #5aaeea; --c1: #ff8f4a; --c2: #3fc79a; --c3: #e58cc9; --c4: #e0b040;
  --c5: #9ad4f5; --c6: #b4b4b4; --c7: #d59a8c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 12px 16px 48px; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.5rem; margin: 8px 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 28px 0 8px; padding-bottom: 4px; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 16px 0 6px; overflow-wrap: anywhere; }
p { margin: 6px 0; grid-column: 1 / -1; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th { color: var(--faint); font-weight: 600; max-width: 16em; }
td { max-width: 30em; overflow-wrap: break-word; }
td.number { white-space: nowrap; }
th.number, td.number { text-align: right; padding: 4px 0 4px 16px; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); max-width: min(22em, 42vw); }
td:first-child { color: var(--faint); }
summary { cursor: pointer; padding: 8px 0; color: var(--faint); }
input[name=axis] { position: fixed; top: 0; opacity: 0; pointer-events: none; }
.axes { margin: 0 0 10px; font-size: .85rem; }
.axes label { display: inline-block; padding: 3px 14px; border: 1px solid var(--rule); cursor: pointer; }
#tokens:checked ~ section label[for=tokens], #steps:checked ~ section label[for=steps] {
  background: var(--band2); font-weight: 600; }
#tokens:focus-visible ~ section label[for=tokens], #steps:focus-visible ~ section label[for=steps] {
  outline: 2px solid var(--c0); }
#tokens:checked ~ section .by-steps, #steps:checked ~ section .by-tokens { display: none; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); gap: 18px 24px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 560px), 1fr)); gap: 18px 24px; }
figure { margin: 0; min-width: 0; }
figcaption { font-weight: 600; margin-bottom: 4px; overflow-wrap: anywhere; }
figure > svg { display: block; width: 100%; height: auto; }
img { max-width: 100%; height: auto; background: #fff; }
svg text { font-size: 12.5px; fill: var(--faint); }
svg text.small { font-size: 11px; fill: var(--ink); }
.grid { stroke: var(--rule); stroke-width: .6; }
.axis { stroke: var(--faint); fill: none; stroke-width: .8; }
.line { fill: none; stroke-linejoin: round; }
.faint { opacity: .3; }
.d1 { stroke-dasharray: 6 3; } .d2 { stroke-dasharray: 2 2.5; } .d3 { stroke-dasharray: 8 2 2 2; }
.phase.p0 { fill: var(--band); } .phase.p1 { fill: var(--band2); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 4px 0 0; padding: 0;
  font-size: .82rem; color: var(--faint); }
.legend li { overflow-wrap: anywhere; }
.legend svg { width: 24px; height: 8px; margin-right: 5px; vertical-align: middle; }
""" + "".join(
    f".line.c{number} {{ stroke: var(--c{number}); }} circle.c{number} {{ fill: var(--c{number}); }}\n"
    for number in range(8)
)
