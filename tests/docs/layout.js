// What does not fit on the page as the browser shows it: an expression, whose value is a list of texts.
(() => {
  const found = [], root = document.documentElement, content = document.querySelector(".md-content");
  if (root.scrollWidth > root.clientWidth)
    found.push(`the page is ${root.scrollWidth} pixels wide, its window ${root.clientWidth}`);

  // Whether a part of a line cannot be seen, however far its boxes are scrolled.
  const isCut = (element, left, right) => {
    for (; element !== root; element = element.parentElement) {
      const overflow = getComputedStyle(element).overflowX, box = element.getBoundingClientRect();
      if (overflow === "visible") continue;
      const scrolls = ["auto", "scroll"].includes(overflow);
      const end = scrolls ? box.left - element.scrollLeft + element.scrollWidth : box.right;
      if (left < box.left - 1 || right > end + 1) return true;
      if (scrolls) [left, right] = [box.left, box.right];
    }
    return left < -1 || right > root.clientWidth + 1;
  };

  // The contrast of a text to what it stands on, as WCAG 2 defines it: 4.5 is its level AA.
  const colour = text => text.match(/[\d.]+/g).map(Number);
  const over = ([r, g, b, a = 1], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
  const ground = element => over(
    colour(getComputedStyle(element).backgroundColor),
    element === root ? [255, 255, 255] : ground(element.parentElement));
  const luminance = parts => parts
    .map(part => part / 255 <= 0.04045 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4)
    .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0.05);
  const contrast = element => {
    const below = ground(element), text = over(colour(getComputedStyle(element).color), below);
    const [low, high] = [luminance(text), luminance(below)].sort((one, other) => one - other);
    return high / low;
  };

  const texts = document.createTreeWalker(content, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode, element = text.parentElement;
    if (!element.checkVisibility() || element.closest(".headerlink")) continue;
    if (!text.data.trim()) continue;
    const cell = element.closest("td, th")?.getBoundingClientRect();
    if (parseFloat(getComputedStyle(element).fontSize) < 11) found.push(`${text.data} is too small`);
    if (contrast(element) < 4.5) found.push(`${text.data} has a contrast of ${contrast(element)}`);
    for (const {0: word, index} of text.data.matchAll(/\S+/g)) {
      const range = document.createRange();
      range.setStart(text, index);
      range.setEnd(text, index + word.length);
      const boxes = [...range.getClientRects()].filter(box => box.width);
      if (!boxes.length) continue;
      const right = Math.max(...boxes.map(box => box.right));
      if (isCut(element, Math.min(...boxes.map(box => box.left)), right)) found.push(`${word} is cut`);
      if (cell && right > cell.right + 1) found.push(`${word} leaves its cell`);
      // A browser breaks a line after a hyphen and a slash as well.
      if (boxes.at(-1).top - boxes[0].top > boxes[0].height / 2 && !/[-\/]/.test(word.slice(0, -1)))
        found.push(`${word} is broken`);
    }
  }

  for (const box of content.querySelectorAll(".md-typeset__scrollwrap")) {
    const name = box.querySelector("tbody td");
    box.scrollLeft = box.scrollWidth;
    const {left, right} = name.getBoundingClientRect(), seen = box.getBoundingClientRect();
    if (left < seen.left - 1 || right > (seen.left + seen.right) / 2 && box.scrollLeft)
      found.push(`the column of ${name.textContent} does not stay visible, or leaves no room`);
    box.scrollLeft = 0;
    // Only a phone is too narrow for a table.
    if (root.clientWidth > 1000 && box.scrollWidth > box.clientWidth + 1)
      found.push(`the table of ${name.textContent} is wider than the text`);
  }

  for (const picture of content.querySelectorAll("img")) {
    if (!picture.naturalWidth) found.push(`${picture.alt}: no picture`);
    if (picture.width < 0.8 * picture.naturalWidth) found.push(`${picture.alt}: too small to read`);
    if (isCut(picture, picture.x, picture.x + picture.width)) found.push(`${picture.alt}: cut`);
  }
  return found;
})()
