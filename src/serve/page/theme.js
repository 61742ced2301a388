// Applies the stored colour theme before the page is drawn. This is a classic script, because a module would run too late and the
// page would flash in the wrong colours.
"use strict";
try {
  const theme = localStorage.getItem("flatkv-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is disabled; the page follows the system.
}
