// Conversations, kept in the browser (IndexedDB): the last ones, up to a number. Where a browser keeps nothing, they
// live as long as the page.

const MOST = 200;

let database = null;
const kept = new Map();

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// All conversations, the last one first.
export async function load() {
  try {
    const opening = indexedDB.open("deltic", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", {keyPath: "id"});
    database = await done(opening);
    for (const talk of await done(table("readonly").getAll())) kept.set(talk.id, talk);
  } catch {
    database = null;
  }
  return all();
}

export function all() {
  return [...kept.values()].sort((a, b) => b.updated - a.updated);
}

export function find(id) {
  return kept.get(id);
}

export async function put(talk) {
  kept.set(talk.id, talk);
  const old = all().slice(MOST);
  for (const {id} of old) kept.delete(id);
  await write((talks) => {
    talks.put(talk);
    for (const {id} of old) talks.delete(id);
  });
}

export async function remove(id) {
  kept.delete(id);
  await write((talks) => talks.delete(id));
}

export async function clear() {
  kept.clear();
  await write((talks) => talks.clear());
}

const table = (mode) => database.transaction("conversations", mode).objectStore("conversations");

async function write(change) {
  if (!database) return;
  try {
    const talks = table("readwrite");
    change(talks);
    await new Promise((resolve, reject) => {
      talks.transaction.oncomplete = resolve;
      talks.transaction.onabort = () => reject(talks.transaction.error);
    });
  } catch (error) {
    console.warn("a conversation could not be kept:", error);
  }
}
