"""The page around the report: everything inline, light and dark."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>@TITLE@</title>
<style>
:root {
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2130; --soft: #667085; --rule: #e4e7ec;
  --c0: #2f6fdf; --c1: #e0762f; --c2: #2a9d72; --c3: #8a5cd6; --c4: #c9a227; --c5: #98a2b3;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11141a; --card: #1a1f28; --ink: #e7eaf0; --soft: #98a2b3; --rule: #2b323e;
    --c0: #6ea2ff; --c1: #f59a5c; --c2: #4fc79a; --c3: #b394f0; --c4: #e2c55a; --c5: #667085;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 32px 24px 64px; max-width: 1180px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { margin: 0; font-size: 26px; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: 0; font-size: 16px; display: inline; }
header p, figcaption p { margin: 2px 0 10px; color: var(--soft); }
figcaption p { font-size: 13px; }
section { margin-top: 28px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 14px; margin-top: 18px; }
.tile, figure, details, section > .scroll {
  background: var(--card); border: 1px solid var(--rule); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile b, .tile small { display: block; color: var(--soft); font-weight: 500; font-size: 13px; }
.tile strong { font-size: 25px; font-weight: 650; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 14px; margin-top: 14px; }
figure { margin: 0; padding: 16px 18px 12px; }
svg { display: block; width: 100%; height: auto; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line, .faint { fill: none; stroke-width: 2.4; stroke-linejoin: round; stroke-linecap: round; }
.faint { stroke-width: 1.3; opacity: 0.4; }
.hit { fill: transparent; }
.tick, .axis { fill: var(--soft); font-size: 12px; font-family: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; padding: 4px 0 2px 4px; font-size: 13px; color: var(--soft); }
.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; padding: 6px 16px; margin-top: 10px; }
details { padding: 12px 0 4px; }
details .scroll { margin-top: 4px; }
summary { cursor: pointer; padding: 0 16px 6px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; font-weight: 400; padding: 4px 14px 4px 0;
  border-bottom: 1px solid var(--rule); vertical-align: top; }
tbody tr:last-child > *, table:not(.numbers) tr:last-child > * { border-bottom: 0; }
th { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
td { overflow-wrap: anywhere; }
thead > tr > * { color: var(--soft); font-family: inherit; }
.numbers td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
small { color: var(--soft); }
.error { stroke-width: 1.6; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 300px), 1fr)); gap: 14px;
  margin-top: 10px; }
.answer { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 10px 14px; }
.answer img { display: block; margin: 6px 0 0; max-width: 256px; image-rendering: pixelated; }
.answer pre { margin: 6px 0 0; white-space: pre-wrap; overflow-wrap: anywhere; max-height: 18em; overflow-y: auto;
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.inserted { color: var(--soft); }
h3 { font-size: 14px; margin: 16px 0 0; }
</style>
</head>
<body>
@BODY@
</body>
</html>
"""
