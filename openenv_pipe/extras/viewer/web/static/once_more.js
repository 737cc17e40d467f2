// Load the page again, now with the cookie, which a browser leaves out when a link of another site opens the page.

const [opened] = performance.getEntriesByType("navigation");
if (opened?.type === "navigate") location.reload();
