/* Keeps drawings legible.
   - On phones: Mermaid shrinks a drawing to the width of the page, so that letters of 16 px get tiny. At a
     scale of 0.7 the drawing scrolls inside its frame instead (site.css).
   - In the dark: the theme does not colour the arrowheads of sequence diagrams. */
const LEAST_SCALE = 0.7;
const ARROWHEADS = "<style>marker path { fill: var(--md-mermaid-edge-color) !important }</style>";
const render = mermaid.render.bind(mermaid);
mermaid.render = async (...input) => {
  const drawing = await render(...input);
  drawing.svg = drawing.svg.replace(
    /style="max-width: ([\d.]+)px;/,
    (style, width) => `${style} min-width: ${width * LEAST_SCALE}px;`,
  ).replace("</svg>", `${ARROWHEADS}</svg>`);
  return drawing;
};
