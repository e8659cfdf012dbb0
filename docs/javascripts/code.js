// Browsers may break a line after the hyphens of an option: short code in the text stays on one line.
document$.subscribe(() => {
  for (const code of document.querySelectorAll("p > code, li > code")) {
    if (code.textContent.length < 40) code.style.whiteSpace = "nowrap";
  }
});
