// Applies the stored colour theme before the page is drawn. Classic script, because modules run too late and would cause a flash.
"use strict";
try {
  const theme = localStorage.getItem("flatkv-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage is disabled; the page follows the system.
}
