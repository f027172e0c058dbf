//! Decodes with the native kernels alone: the same program as decode.c, which says more, and prints the same ids.
//!
//!   decode [THREADS [LEVEL]]
use std::ffi::{c_int, c_void, CStr};
use std::process::exit;
use std::ptr::{null, null_mut};

/// What the program uses of deltic.h, in the same order.
mod deltic {
    use std::ffi::{c_char, c_int, c_void};

    pub const ABI: c_int = 19;
    pub const F32: i64 = 0;
    pub const Q8_0: i64 = 8;
    pub const Q4_K: i64 = 12;
    pub const BF16: i64 = 30;

    #[repr(C)]
    pub struct Pool {
        _private: [u8; 0],
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct Matrix {
        pub kind: i64,
        pub rows: i64,
        pub columns: i64,
        pub data: *const c_void,
    }

    #[repr(C)]
    pub struct Weight {
        pub count: i64,
        pub parts: [Matrix; 4],
        pub slices: i64,
        pub runs: i64,
    }

    #[repr(C)]
    pub struct Batch {
        pub rows: i64,
        pub tokens: i64,
        pub logits: i64,
        pub emits: i64,
        pub table: i64,
        pub given: i64,
        pub ids: *const i64,
        pub positions: *const i64,
        pub starts: *const i64,
        pub done: *const i64,
        pub pages: *const i64,
        pub store: *const i64,
        pub source: *const i64,
        pub target: *const i64,
        pub base: *const i64,
        pub ring: *const i64,
        pub append: *const u8,
        pub emit_row: *const i64,
        pub emit_length: *const i64,
        pub emit_slot: *const i64,
        pub logit_tokens: *const i64,
        pub given_tokens: *const i64,
        pub given_rows: *const f32,
        /// 0: no token has an adapter, and the next two are not read.
        pub adapters: i64,
        pub adapter: *const i64,
        pub adapter_list: *const *const c_void,
    }

    #[repr(C)]
    pub struct GdnLayer {
        pub in_proj: Weight,
        pub out_proj: Weight,
        pub conv: *const f32,
        pub decay: *const f32,
        pub dt_bias: *const f32,
        pub norm: *const f32,
        pub key_heads: i64,
        pub value_heads: i64,
        pub key_dim: i64,
        pub value_dim: i64,
        pub kernel: i64,
        pub tiled: i64,
        pub eps: f32,
    }

    #[repr(C)]
    pub struct States {
        pub recurrent: *mut f32,
        pub conv: *mut c_void,
        pub places: i64,
        pub kind: i64,
        pub inputs: *mut c_void,
        pub keys: *mut f32,
        pub updates: *mut f32,
        pub decays: *mut f32,
        pub slots: i64,
        pub units: i64,
    }

    #[repr(C)]
    pub struct AttentionLayer {
        pub qkv: Weight,
        pub o_proj: Weight,
        pub q_norm: *const f32,
        pub k_norm: *const f32,
        pub bias: *const f32,
        pub heads: i64,
        pub kv_heads: i64,
        pub head_dim: i64,
        pub rotary_dim: i64,
        pub gate: i64,
        pub eps: f32,
    }

    #[repr(C)]
    pub struct Kv {
        pub keys: *mut c_void,
        pub values: *mut c_void,
        pub kind: i64,
        pub pages: i64,
    }

    #[repr(C)]
    pub struct Layer {
        pub input_norm: *const f32,
        pub post_norm: *const f32,
        pub gdn: *const GdnLayer,
        pub states: *const States,
        pub attention: *const AttentionLayer,
        pub kv: *const Kv,
        pub gate_up: Weight,
        pub down: Weight,
        pub moe: *const c_void,
    }

    #[repr(C)]
    pub struct Model {
        pub hidden: i64,
        pub layers: i64,
        pub layer: *const Layer,
        pub embedding: Matrix,
        pub head: Weight,
        pub norm: *const f32,
        pub frequencies: *const f32,
        pub axes: *const i64,
        pub rotary_dim: i64,
        pub eps: f32,
        pub attention_factor: f32,
    }

    #[repr(C)]
    pub struct Devices {
        _private: [u8; 0],
    }

    #[repr(C)]
    pub struct DeviceProperties {
        pub kind: i64,
        pub number: i64,
        pub memory_total: i64,
        pub memory_free: i64,
        pub major: i64,
        pub minor: i64,
        pub cores: i64,
        pub name: [c_char; 256],
    }

    #[link(name = "deltic")]
    extern "C" {
        pub fn deltic_abi() -> c_int;
        pub fn deltic_page() -> c_int;
        pub fn deltic_panel() -> c_int;
        pub fn deltic_best_level() -> c_int;
        pub fn deltic_pool_new(threads: c_int, level: c_int) -> *mut Pool;
        pub fn deltic_pool_free(pool: *mut Pool);
        pub fn deltic_packed_bytes(kind: i64, rows: i64, columns: i64) -> i64;
        pub fn deltic_pack(
            kind: i64, blocks: *const c_void, first: i64, count: i64, columns: i64, packed: *mut c_void,
        );
        pub fn deltic_quantize(kind: i64, x: *const f32, rows: i64, columns: i64, blocks: *mut c_void) -> c_int;
        pub fn deltic_top(
            pool: *mut Pool, logits: *const f32, rows: i64, width: i64, count: i64, temperatures: *const f32,
            values: *mut f32, ids: *mut i64, log_totals: *mut f64, healthy: *mut u8,
        ) -> c_int;
        pub fn deltic_forward(
            pool: *mut Pool, model: *const Model, batch: *const Batch, final_hidden: *mut f32, logits: *mut f32,
        ) -> c_int;
        pub fn deltic_devices_open(devices: *mut *mut Devices) -> c_int;
        pub fn deltic_devices_close(devices: *mut Devices) -> c_int;
        pub fn deltic_devices_error(devices: *mut Devices) -> *const c_char;
        pub fn deltic_device_count(devices: *mut Devices, count: *mut i64) -> c_int;
        pub fn deltic_device_get(devices: *mut Devices, device: i64, properties: *mut DeviceProperties) -> c_int;
        pub fn deltic_device_allocate(
            devices: *mut Devices, device: i64, bytes: i64, memory: *mut *mut c_void,
        ) -> c_int;
        pub fn deltic_device_free(devices: *mut Devices, memory: *mut c_void) -> c_int;
        pub fn deltic_stream_new(devices: *mut Devices, device: i64, stream: *mut i64) -> c_int;
        pub fn deltic_stream_free(devices: *mut Devices, stream: i64) -> c_int;
        pub fn deltic_stream_synchronize(devices: *mut Devices, stream: i64) -> c_int;
        pub fn deltic_device_copy(
            devices: *mut Devices, target_device: i64, target: *mut c_void, source_device: i64,
            source: *const c_void, bytes: i64, stream: i64,
        ) -> c_int;
    }
}

use deltic::{AttentionLayer, Batch, GdnLayer, Kv, Layer, Matrix, Model, Pool, States, Weight};

const HIDDEN: usize = 256;
const VOCABULARY: usize = 500;
const WIDTH: usize = 512;
const KEY_HEADS: usize = 2;
const VALUE_HEADS: usize = 4;
const KEY_DIM: usize = 32;
const VALUE_DIM: usize = 32;
const KERNEL: usize = 4;
const VALUES: usize = VALUE_HEADS * VALUE_DIM;
const CHANNELS: usize = 2 * KEY_HEADS * KEY_DIM + VALUES;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const ROTARY_DIM: usize = 32;
const PROMPT: usize = 150;
const ANSWER: usize = 30;
const SEQUENCES: usize = 2;
const PAGE: usize = 16;
const TABLE: usize = (PROMPT + ANSWER + PAGE - 1) / PAGE;
const PANEL: usize = 16;

fn fail(what: &str) -> ! {
    eprintln!("decode: {what}");
    exit(2);
}

/// The devices. Closing them gives back all memory, which is aligned as packed matrices must be.
struct Devices(*mut deltic::Devices);

impl Devices {
    fn open() -> Devices {
        let mut found = null_mut();
        if unsafe { deltic::deltic_devices_open(&mut found) } != 0 {
            fail("out of memory");
        }
        Devices(found)
    }

    fn check(&self, status: c_int) {
        if status != 0 {
            fail(&unsafe { CStr::from_ptr(deltic::deltic_devices_error(self.0)) }.to_string_lossy());
        }
    }

    fn allocate(&self, device: i64, bytes: usize) -> *mut c_void {
        let mut memory = null_mut();
        self.check(unsafe { deltic::deltic_device_allocate(self.0, device, bytes as i64, &mut memory) });
        memory
    }

    /// Copies numbers to a device and back, in a stream of its own: they must be the same.
    fn visit(&self, device: i64, numbers: &[f32]) {
        let (bytes, mut back, mut stream) = (std::mem::size_of_val(numbers), vec![0f32; numbers.len()], 0);
        let there = self.allocate(device, bytes);
        let (from, to, size) = (numbers.as_ptr().cast(), back.as_mut_ptr().cast(), bytes as i64);
        unsafe {
            self.check(deltic::deltic_stream_new(self.0, device, &mut stream));
            self.check(deltic::deltic_device_copy(self.0, device, there, 0, from, size, stream));
            self.check(deltic::deltic_device_copy(self.0, 0, to, device, there, size, stream));
            self.check(deltic::deltic_stream_synchronize(self.0, stream));
            self.check(deltic::deltic_stream_free(self.0, stream));
            self.check(deltic::deltic_device_free(self.0, there));
        }
        if numbers.iter().zip(&back).any(|(a, b)| a.to_bits() != b.to_bits()) {
            fail("a device gave other numbers back");
        }
    }

    /// Names every device on standard error, and visits it.
    fn visit_all(&self, numbers: &[f32]) {
        let mut count = 0;
        self.check(unsafe { deltic::deltic_device_count(self.0, &mut count) });
        for device in 0..count {
            let mut found: deltic::DeviceProperties = unsafe { std::mem::zeroed() };
            self.check(unsafe { deltic::deltic_device_get(self.0, device, &mut found) });
            let name = unsafe { CStr::from_ptr(found.name.as_ptr()) }.to_string_lossy();
            let (free, total) = (found.memory_free >> 20, found.memory_total >> 20);
            eprintln!("device {device}: {name}, {free} of {total} MiB free");
            self.visit(device, numbers);
        }
    }
}

impl Drop for Devices {
    fn drop(&mut self) {
        unsafe { deltic::deltic_devices_close(self.0) };
    }
}

/// Makes the numbers, and owns all that the structs point to.
struct Maker {
    counter: u64,
    devices: Devices,
}

impl Maker {
    /// All bits are set, which is NaN everywhere: nothing is read that has not been written.
    fn store(&mut self, bytes: usize) -> *mut c_void {
        let memory = self.devices.allocate(0, bytes);
        unsafe { memory.cast::<u8>().write_bytes(0xff, bytes) };
        memory
    }

    fn keep<T: Copy>(&mut self, values: &[T]) -> *const T {
        let to: *mut T = self.store(std::mem::size_of_val(values)).cast();
        unsafe { to.copy_from_nonoverlapping(values.as_ptr(), values.len()) };
        to
    }

    /// splitmix64
    fn draw(&mut self) -> u64 {
        self.counter = self.counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.counter;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    /// From middle - reach to middle + reach.
    fn number(&mut self, middle: f32, reach: f32) -> f32 {
        let unit = (self.draw() >> 40) as f32 / 8388608.0 - 1.0;
        middle + reach * unit
    }

    fn numbers(&mut self, count: usize, middle: f32, reach: f32) -> *const f32 {
        let made: Vec<f32> = (0..count).map(|_| self.number(middle, reach)).collect();
        self.keep(&made)
    }

    /// Rows of blocks as a GGUF file has them.
    fn blocks(&mut self, kind: i64, rows: usize, columns: usize) -> Vec<u8> {
        let mut blocks = Vec::new();
        if kind == deltic::Q8_0 {
            for _ in 0..rows * columns / 32 {
                blocks.extend([0x00, 0x10]); // 2^-11 in float16
                blocks.extend((0..32).map(|_| (((self.draw() >> 40) % 255) as i32 - 127) as u8));
            }
            return blocks;
        }
        let made: Vec<f32> = (0..rows * columns).map(|_| self.number(0.0, 1.0 / 16.0)).collect();
        if kind == deltic::F32 {
            return made.iter().flat_map(|number| number.to_ne_bytes()).collect();
        }
        let whole = unsafe { deltic::deltic_packed_bytes(kind, PANEL as i64, columns as i64) };
        blocks.resize(whole as usize, 0);
        let to = blocks.as_mut_ptr().cast();
        if unsafe { deltic::deltic_quantize(kind, made.as_ptr(), rows as i64, columns as i64, to) } != 0 {
            fail("this type cannot be quantized to");
        }
        blocks
    }

    fn matrix(&mut self, kind: i64, rows: usize, columns: usize) -> Matrix {
        let size = unsafe { deltic::deltic_packed_bytes(kind, rows as i64, columns as i64) };
        if size < 0 {
            fail("no matrix of this type can have so many columns");
        }
        let data = self.store(size as usize);
        for first in (0..rows).step_by(PANEL) {
            let count = PANEL.min(rows - first);
            let blocks = self.blocks(kind, count, columns);
            unsafe {
                deltic::deltic_pack(kind, blocks.as_ptr().cast(), first as i64, count as i64, columns as i64, data);
            }
        }
        Matrix { kind, rows: rows as i64, columns: columns as i64, data }
    }

    fn weight(&mut self, kind: i64, rows: usize, columns: usize) -> Weight {
        weight_of(&[self.matrix(kind, rows, columns)])
    }

    fn layer(&mut self) -> Layer {
        Layer {
            input_norm: self.numbers(HIDDEN, 1.0, 0.125),
            post_norm: self.numbers(HIDDEN, 1.0, 0.125),
            gdn: null(),
            states: null(),
            attention: null(),
            kv: null(),
            gate_up: self.weight(deltic::Q4_K, 2 * WIDTH, HIDDEN),
            down: self.weight(deltic::Q4_K, HIDDEN, WIDTH),
            moe: null(),
        }
    }

    fn gdn(&mut self) -> GdnLayer {
        GdnLayer {
            in_proj: self.weight(deltic::Q8_0, CHANNELS + VALUES + 2 * VALUE_HEADS, HIDDEN),
            out_proj: self.weight(deltic::Q8_0, HIDDEN, VALUES),
            conv: self.numbers(CHANNELS * KERNEL, 0.0, 0.5),
            decay: self.numbers(VALUE_HEADS, -0.5, 0.25),
            dt_bias: self.numbers(VALUE_HEADS, 0.0, 1.0),
            norm: self.numbers(VALUE_DIM, 1.0, 0.125),
            key_heads: KEY_HEADS as i64,
            value_heads: VALUE_HEADS as i64,
            key_dim: KEY_DIM as i64,
            value_dim: VALUE_DIM as i64,
            kernel: KERNEL as i64,
            tiled: 0,
            eps: 1e-6,
        }
    }

    fn attention(&mut self) -> AttentionLayer {
        let queries = self.matrix(deltic::Q4_K, 2 * HEADS * HEAD_DIM, HIDDEN);
        let keys_and_values = self.matrix(deltic::Q8_0, 2 * KV_HEADS * HEAD_DIM, HIDDEN);
        AttentionLayer {
            qkv: weight_of(&[queries, keys_and_values]),
            o_proj: self.weight(deltic::Q4_K, HIDDEN, HEADS * HEAD_DIM),
            q_norm: self.numbers(HEAD_DIM, 1.0, 0.125),
            k_norm: self.numbers(HEAD_DIM, 1.0, 0.125),
            bias: null(),
            heads: HEADS as i64,
            kv_heads: KV_HEADS as i64,
            head_dim: HEAD_DIM as i64,
            rotary_dim: ROTARY_DIM as i64,
            gate: 1,
            eps: 1e-6,
        }
    }

    fn model(&mut self, layers: &[Layer]) -> Model {
        let embedding = self.matrix(deltic::F32, VOCABULARY, HIDDEN);
        let head = self.weight(deltic::Q8_0, VOCABULARY, HIDDEN);
        let frequencies: Vec<f32> = (0..ROTARY_DIM / 2).map(|i| 1.0 / (1u64 << i) as f32).collect();
        Model {
            hidden: HIDDEN as i64,
            layers: layers.len() as i64,
            layer: layers.as_ptr(),
            embedding,
            head,
            norm: self.numbers(HIDDEN, 1.0, 0.125),
            frequencies: self.keep(&frequencies),
            axes: self.keep(&[0i64; ROTARY_DIM / 2]),
            rotary_dim: ROTARY_DIM as i64,
            eps: 1e-6,
            attention_factor: 1.0,
        }
    }
}

fn weight_of(matrices: &[Matrix]) -> Weight {
    let mut parts = [Matrix { kind: 0, rows: 0, columns: 0, data: null() }; 4];
    parts[..matrices.len()].copy_from_slice(matrices);
    Weight { count: matrices.len() as i64, parts, slices: 0, runs: 1 }
}

struct Sequence {
    slot: i64,
    length: usize,
    pages: [i64; TABLE],
}

struct Engine {
    pool: *mut Pool,
    model: Model,
}

impl Engine {
    /// Runs the next tokens of each sequence, `ids` one sequence after another; returns the logits of the last ones.
    fn run(&self, sequences: &mut [Sequence], ids: &[i64]) -> Vec<f32> {
        let (count, tokens) = (sequences.len(), ids.len());
        let chunk = tokens / count;
        let mut positions = vec![0i64; 3 * tokens];
        let (mut store, mut starts, mut wanted) = (vec![], vec![0i64], vec![]);
        let done: Vec<i64> = sequences.iter().map(|sequence| sequence.length as i64).collect();
        let slots: Vec<i64> = sequences.iter().map(|sequence| sequence.slot).collect();
        let pages: Vec<i64> = sequences.iter().flat_map(|sequence| sequence.pages).collect();
        for sequence in sequences {
            for _ in 0..chunk {
                let place = sequence.length;
                for axis in 0..3 {
                    positions[axis * tokens + store.len()] = place as i64;
                }
                store.push(sequence.pages[place / PAGE] * PAGE as i64 + (place % PAGE) as i64);
                sequence.length += 1;
            }
            starts.push(store.len() as i64);
            wanted.push(store.len() as i64 - 1);
        }
        let batch = Batch {
            rows: count as i64,
            tokens: tokens as i64,
            logits: count as i64,
            emits: 0,
            table: TABLE as i64,
            given: 0,
            ids: ids.as_ptr(),
            positions: positions.as_ptr(),
            starts: starts.as_ptr(),
            done: done.as_ptr(),
            pages: pages.as_ptr(),
            store: store.as_ptr(),
            source: slots.as_ptr(),
            target: slots.as_ptr(),
            base: null(),
            ring: null(),
            append: null(),
            emit_row: null(),
            emit_length: null(),
            emit_slot: null(),
            logit_tokens: wanted.as_ptr(),
            given_tokens: null(),
            given_rows: null(),
            adapters: 0,
            adapter: null(),
            adapter_list: null(),
        };
        let mut logits = vec![0f32; count * VOCABULARY];
        let to = logits.as_mut_ptr();
        if unsafe { deltic::deltic_forward(self.pool, &self.model, &batch, null_mut(), to) } != 0 {
            fail("a step failed");
        }
        logits
    }

    /// The best id of each row of logits.
    fn choose(&self, logits: &[f32]) -> Vec<i64> {
        let rows = logits.len() / VOCABULARY;
        let (mut ids, mut values, mut healthy) = (vec![0i64; rows], vec![0f32; rows], vec![0u8; rows]);
        let status = unsafe {
            deltic::deltic_top(
                self.pool, logits.as_ptr(), rows as i64, VOCABULARY as i64, 1, null(), values.as_mut_ptr(),
                ids.as_mut_ptr(), null_mut(), healthy.as_mut_ptr(),
            )
        };
        if status != 0 {
            fail("out of memory");
        }
        if healthy.contains(&0) {
            fail("the logits are not sound");
        }
        ids
    }
}

fn check_same(one: &[f32], other: &[f32], when: &str) {
    if one.iter().zip(other).any(|(a, b)| a.to_bits() != b.to_bits()) {
        eprintln!("decode: the sequences differ {when}");
        exit(1);
    }
}

fn main() {
    let arguments: Vec<c_int> = std::env::args().skip(1).map(|text| text.parse().unwrap_or(0)).collect();
    let compiled = unsafe { [deltic::deltic_abi(), deltic::deltic_page(), deltic::deltic_panel()] };
    if compiled != [deltic::ABI, PAGE as c_int, PANEL as c_int] {
        fail("library and declarations are of different versions");
    }
    let best = unsafe { deltic::deltic_best_level() };
    let (threads, level) = (*arguments.first().unwrap_or(&1), *arguments.get(1).unwrap_or(&best));
    let pool = unsafe { deltic::deltic_pool_new(threads, level) };
    if pool.is_null() {
        fail("this processor has no such level, or memory ran out");
    }

    let mut maker = Maker { counter: 0, devices: Devices::open() };
    let page_bytes = SEQUENCES * TABLE * PAGE * KV_HEADS * HEAD_DIM * 2;
    let (gdn, mut first) = (maker.gdn(), maker.layer());
    let (attention, mut second) = (maker.attention(), maker.layer());
    let states = States {
        recurrent: maker.store(SEQUENCES * VALUE_HEADS * KEY_DIM * VALUE_DIM * 4).cast(),
        conv: maker.store(SEQUENCES * KERNEL * CHANNELS * 2),
        places: KERNEL as i64,
        kind: deltic::BF16,
        inputs: null_mut(),
        keys: null_mut(),
        updates: null_mut(),
        decays: null_mut(),
        slots: SEQUENCES as i64,
        units: 0,
    };
    let pages = (SEQUENCES * TABLE) as i64;
    let kv = Kv { keys: maker.store(page_bytes), values: maker.store(page_bytes), kind: deltic::BF16, pages };
    (first.gdn, first.states) = (&gdn, &states);
    (second.attention, second.kv) = (&attention, &kv);
    let layers = [first, second];
    let engine = Engine { pool, model: maker.model(&layers) };

    let pages = |from: &dyn Fn(usize) -> usize| std::array::from_fn(|i| from(i) as i64);
    let mut sequences = [
        Sequence { slot: 0, length: 0, pages: pages(&|i| 2 * i) },
        Sequence { slot: 1, length: 0, pages: pages(&|i| 2 * (TABLE - i) - 1) },
    ];
    let prompt: Vec<i64> = (0..PROMPT).map(|_| (maker.draw() % VOCABULARY as u64) as i64).collect();
    let mut logits = engine.run(&mut sequences[..1], &prompt);
    let mut other = vec![];
    for id in &prompt {
        other = engine.run(&mut sequences[1..], &[*id]);
    }
    check_same(&logits, &other, "after the prompt");
    logits.extend(other);
    eprintln!("level {level} of {best}, threads: {threads}");
    let mut answer = vec![];
    for _ in 0..ANSWER {
        let chosen = engine.choose(&logits);
        answer.push(chosen[0].to_string());
        logits = engine.run(&mut sequences, &chosen);
        check_same(&logits[..VOCABULARY], &logits[VOCABULARY..], "in a batch");
    }
    println!("{}", answer.join(" "));
    maker.devices.visit_all(&logits);
    unsafe { deltic::deltic_pool_free(pool) };
}
