// Browsers may break a line after the hyphens of an option, or between the sign ± and its number.
document$.subscribe(() => {
  for (const code of document.querySelectorAll("p > code, li > code, td > code, em > code, a > code")) {
    const words = code.textContent.split(/(\s+)/).map((word) => {
      const span = document.createElement("span");
      span.textContent = word;
      if (word.length < 50) span.style.whiteSpace = word.trim() ? "nowrap" : "normal";
      return span;
    });
    code.replaceChildren(...words);
  }
  const texts = document.createTreeWalker(document.querySelector(".md-content") ?? document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.data.includes(" ± ") && !text.parentElement.closest("pre")) text.data = text.data.replaceAll(" ± ", "\u00a0±\u00a0");
  }
});
