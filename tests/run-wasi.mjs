// Runs a wasm32-wasip1 test binary under node: `node --no-warnings run-wasi.mjs TESTS.wasm [ARGUMENT...]`.
import { readFile } from "node:fs/promises";
import { WASI } from "node:wasi";

const args = process.argv.slice(2);
const wasi = new WASI({ version: "preview1", args, returnOnExit: true });
const instance = await WebAssembly.instantiate(await WebAssembly.compile(await readFile(args[0])), wasi.getImportObject());
process.exitCode = wasi.start(instance);
