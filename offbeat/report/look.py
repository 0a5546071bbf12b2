"""How a report looks: one style sheet for page and pictures, light and dark, and a small script for the pointer."""

from __future__ import annotations

from collections.abc import Sequence

# Okabe and Ito's hues, darkened (or lightened) until letters in them can be read: at least 4.5 : 1 against the page.
LIGHT = ("#0067A8", "#BC4B00", "#00795A", "#A43E7C", "#8A6100", "#5A4BB5", "#0F7884", "#59606C")
DARK = ("#5AB4EC", "#F19055", "#40C79B", "#E595C5", "#E3B54A", "#AA9EF2", "#62CBD5", "#A6AEBB")
PAPER = {"page": "#FFFFFF", "ink": "#1B1F24", "soft": "#5C6470", "rule": "#C9CED6", "grid": "#E9ECF0",
         "lane": "#F3F5F7", "inside": "#FFFFFF", "forward": "#7FC4EE", "backward": "#F2B75B", "update": "#1B1F24",
         "send": "#8E7CC3", "wait": "#DADFE6", "drain": "#9CCFB8", "box": "#1B1F24", "warn": "#8A4B00"}  # fmt: skip
NIGHT = {"page": "#14171B", "ink": "#E8EAED", "soft": "#A0A7B2", "rule": "#454C57", "grid": "#272C33",
         "lane": "#1D2127", "inside": "#101317", "forward": "#4C9FD0", "backward": "#D69A3C", "update": "#F4F5F7",
         "send": "#A594DA", "wait": "#333A44", "drain": "#4F9478", "box": "#0D0F12", "warn": "#F0B267"}  # fmt: skip


def variables(colours: Sequence[str], names: dict[str, str]) -> str:
    """The colours as CSS variables."""
    series = [f"--c{place}:{colour}" for place, colour in enumerate(colours)]
    return ";".join([*series, *(f"--{name}:{colour}" for name, colour in names.items())])


FONT = 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Noto Sans","Liberation Sans",sans-serif'
SERIES = "".join(
    f".c{place}{{stroke:var(--c{place})}}.f{place}{{fill:var(--c{place})}}svg .t{place}{{fill:var(--c{place})}}"
    for place in range(len(LIGHT))
)
OPERATIONS = "".join(
    f".o-{kind}{{fill:var(--{kind})}}" for kind in ("forward", "backward", "update", "send", "wait", "drain")
)
DRAWN = f"""
svg text{{font:400 12.5px {FONT};fill:var(--ink);font-variant-numeric:tabular-nums}}
svg .tick,svg .axis{{font-size:11.5px;fill:var(--soft)}}
svg .title{{font-size:16px;font-weight:600}}
svg .label{{font-size:12.5px}} svg .value{{font-weight:500}}
svg .inside,svg .inside-faint{{font-size:11.5px;font-weight:600;fill:var(--inside)}}
svg .inside-faint{{fill:var(--ink)}}
svg .in-box{{font-size:11.5px;fill:var(--box)}}
.grid{{stroke:var(--grid)}} .rule{{stroke:var(--rule)}} .lane{{fill:var(--lane)}}
.mark{{stroke:var(--ink);stroke-width:2}} .whisker{{stroke:var(--ink);stroke-width:1.2;opacity:.7}}
.line{{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}} .dashed{{stroke-dasharray:5 4}}
.leader{{fill:none;stroke:var(--rule);stroke-dasharray:2 3}} .band{{opacity:.15}} .touch{{fill:transparent}}
.ring{{fill:var(--page);stroke-width:2}}
{SERIES}
{OPERATIONS}
"""
PICTURE = f"svg{{{variables(LIGHT, PAPER)}}}{DRAWN}"  # of a file of its own, on white

PAGE = f"""
:root{{color-scheme:light dark;{variables(LIGHT, PAPER)}}}
@media (prefers-color-scheme:dark){{:root{{{variables(DARK, NIGHT)}}}}}
*{{box-sizing:border-box}}
html{{-webkit-text-size-adjust:100%}}
body{{margin:0;background:var(--page);color:var(--ink);font:400 16px/1.55 {FONT}}}
main,header,footer{{max-width:1088px;margin:0 auto;padding:0 24px}}
header{{padding-top:44px}}
h1{{font-size:32px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 6px}}
h2{{font-size:21px;line-height:1.3;font-weight:650;letter-spacing:-.01em;margin:0 0 4px}}
h3,h4{{font-size:16px;line-height:1.4;font-weight:650;margin:0 0 2px}}
p{{margin:0 0 12px;max-width:78ch;text-wrap:pretty}}
.kicker{{color:var(--soft);font-size:14px;margin:0 0 6px}}
.lead{{color:var(--soft);margin:0 0 4px}}
section{{padding:34px 0 6px}}
section section,details section{{padding:20px 0 2px}}
section.part{{border-top:1px solid var(--rule);margin-top:26px}}
nav{{margin:18px 0 0;font-size:14px;display:flex;flex-wrap:wrap;gap:4px 18px}}
a{{color:var(--c0);text-decoration-thickness:1px;text-underline-offset:3px}}
.figures{{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:20px 28px;
margin:26px 0 0;padding:0}}
.figures div{{border-top:2px solid var(--ink);padding-top:8px;min-width:0}}
.figures dt{{font-size:13px;color:var(--soft)}}
.figures dd{{margin:0;font-size:27px;line-height:1.25;font-weight:600;letter-spacing:-.01em;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}}
.figures small{{display:block;font-size:13px;line-height:1.4;font-weight:400;color:var(--soft);letter-spacing:0;
text-wrap:balance}}
.pictures{{display:grid;grid-template-columns:minmax(0,1fr);gap:26px 32px;margin:14px 0 8px}}
figure{{margin:0;min-width:0;display:flex;flex-direction:column}}
figure svg{{margin-top:auto}}
figcaption{{font-size:14px;color:var(--soft);margin:0 0 10px;max-width:82ch;text-wrap:pretty}}
figcaption b{{display:block;color:var(--ink);font-weight:600;font-size:15px}}
svg{{display:block;width:100%;height:auto;overflow:visible}}
.wide{{display:none}} .narrow{{max-width:480px}}
.table{{overflow-x:auto;margin:14px 0 12px;background:linear-gradient(90deg,var(--page) 40%,transparent) 0 0/28px 100%,
linear-gradient(270deg,var(--page) 40%,transparent) 100% 0/28px 100%,
linear-gradient(90deg,var(--rule),transparent) 0 0/10px 100%,
linear-gradient(270deg,var(--rule),transparent) 100% 0/10px 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}}
table{{border-collapse:collapse;font-size:14px;line-height:1.4;font-variant-numeric:tabular-nums;min-width:100%}}
th{{font-weight:500;color:var(--soft);text-align:right;vertical-align:bottom;white-space:nowrap}}
td{{text-align:right;white-space:nowrap}}
th,td{{padding:6px 0 6px 22px;border-bottom:1px solid var(--grid)}}
thead th{{border-bottom:1px solid var(--rule)}}
th:first-child,td:first-child{{text-align:left;padding-left:0}}
.name{{text-align:left}}
.words{{text-align:left;white-space:normal;min-width:26ch}}
tbody tr:hover td{{background:var(--lane)}}
.facts{{display:grid;grid-template-columns:max-content minmax(0,1fr);gap:3px 22px;font-size:14px;margin:28px 0 0}}
.facts dt{{color:var(--soft)}} .facts dd{{margin:0;overflow-wrap:anywhere}}
code{{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"Liberation Mono",monospace}}
code span{{display:inline-block;max-width:100%;overflow-wrap:anywhere}}
.none{{color:var(--soft);font-size:14.5px;border-left:3px solid var(--rule);padding:2px 0 2px 12px;margin:10px 0 12px}}
.warn{{color:var(--warn);border-color:currentColor}}
.notes{{font-size:13.5px;color:var(--soft);margin:0 0 10px;padding-left:18px;max-width:84ch}}
details{{border-top:1px solid var(--rule);padding:10px 0}}
summary{{cursor:pointer;font-size:17px;font-weight:600;padding:4px 0}}
summary small{{font-weight:400;font-size:14px;color:var(--soft);margin-left:8px}}
footer{{color:var(--soft);font-size:13px;padding-top:26px;padding-bottom:44px}}
#tip{{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--page);font-size:13px;line-height:1.35;
padding:5px 9px;border-radius:5px;max-width:min(300px,80vw);display:none}}
@media (min-width:768px){{.wide{{display:block}}.narrow{{display:none}}
.pictures{{grid-template-columns:repeat(6,minmax(0,1fr))}}.across1,.across2{{grid-column:span 6}}
.across3{{grid-column:span 3}}}}
@media (min-width:960px){{.across2{{grid-column:span 3}}.across3{{grid-column:span 2}}}}
@media (max-width:767px){{main,header,footer{{padding-left:16px;padding-right:16px}}header{{padding-top:28px}}
h1{{font-size:25px}}.facts{{grid-template-columns:minmax(0,1fr);gap:0}}.facts dd{{margin-bottom:8px}}
.figures{{grid-template-columns:1fr 1fr;gap:18px}}.figures dd{{font-size:22px}}summary small{{display:block;margin:0}}}}
@media print{{details:not([open])>*{{display:block}}}}
{DRAWN}
"""

# What a <title> in a picture says, beside the pointer at once; without the script the browser shows it after a while.
SCRIPT = """
(() => {
  const tip = document.createElement("div");
  tip.id = "tip";
  document.body.append(tip);
  const hide = () => { tip.style.display = "none"; };
  for (const title of document.querySelectorAll("svg title")) {
    const shape = title.parentNode, text = title.textContent;
    title.remove();
    shape.setAttribute("aria-label", text);
    shape.addEventListener("pointermove", (event) => {
      tip.textContent = text;
      tip.style.display = "block";
      const box = tip.getBoundingClientRect();
      tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
      tip.style.top = (event.clientY > box.height + 24 ? event.clientY - box.height - 12 : event.clientY + 18) + "px";
    });
    shape.addEventListener("pointerleave", hide);
  }
  addEventListener("scroll", hide, { passive: true });
})();
"""
