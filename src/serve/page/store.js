// Conversations in IndexedDB. The list (id, title, time) is stored separately from the conversations, so that showing the list
// does not load documents. If the browser blocks IndexedDB, conversations are kept in memory until the page is closed.

const NAME = "flatkv",
  VERSION = 1;
const channel = "BroadcastChannel" in window ? new BroadcastChannel("flatkv") : null;
const memory = {list: new Map(), conversations: new Map()};
let database = null;

const finished = request =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const committed = transaction =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });

// Opens the database. Returns false if conversations cannot be stored.
export async function openStore() {
  try {
    const opening = indexedDB.open(NAME, VERSION);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("list", {keyPath: "id"});
      opening.result.createObjectStore("conversations", {keyPath: "id"});
    };
    // A page that the browser freezes while it creates the tables would block all later pages for minutes.
    const abandon = () => opening.readyState === "pending" && opening.transaction?.abort();
    addEventListener("pagehide", abandon);
    database = await finished(opening);
    removeEventListener("pagehide", abandon);
    database.onversionchange = () => database.close();
  } catch {
    database = null;
  }
  return database !== null;
}

// Returns [{id, title, updated}], latest first.
export async function listConversations() {
  const rows = database ? await finished(database.transaction("list").objectStore("list").getAll()) : [...memory.list.values()];
  return rows.sort((a, b) => b.updated - a.updated);
}

export async function loadConversation(id) {
  if (!database) return structuredClone(memory.conversations.get(id));
  return finished(database.transaction("conversations").objectStore("conversations").get(id));
}

// Throws a DOMException, for example QuotaExceededError, if the conversation cannot be stored.
export async function saveConversation(c) {
  const row = {id: c.id, title: c.title, updated: c.updated};
  if (database) {
    const transaction = database.transaction(["list", "conversations"], "readwrite");
    transaction.objectStore("list").put(row);
    transaction.objectStore("conversations").put(c);
    await committed(transaction);
  } else {
    memory.list.set(c.id, row);
    memory.conversations.set(c.id, structuredClone(c));
  }
  channel?.postMessage(c.id);
}

export async function deleteConversation(id) {
  if (database) {
    const transaction = database.transaction(["list", "conversations"], "readwrite");
    transaction.objectStore("list").delete(id);
    transaction.objectStore("conversations").delete(id);
    await committed(transaction);
  }
  memory.list.delete(id);
  memory.conversations.delete(id);
  channel?.postMessage(id);
}

// Calls `act(id)` when another tab has changed a conversation.
export function onOtherTab(act) {
  if (channel) channel.onmessage = event => act(event.data);
}
