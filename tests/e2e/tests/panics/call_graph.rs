//! Who calls whom in a wasm module, and where it ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use anyhow::{Context, Result};
use wasmparser::{
    ElementItems, ExternalKind, FunctionBody, KnownCustom, Name, NameMap, Naming, Operator, Parser, Payload, TypeRef,
};

/// A function of the module.
#[derive(Default)]
pub struct Function {
    /// Its path in Rust, without hashes. Several functions can have one name: instances of a generic one.
    pub name: String,
    /// Whom it calls by name.
    calls: BTreeSet<usize>,
    /// The types of whom it calls through the table.
    calls_indirectly: BTreeSet<u32>,
    /// Whom it calls without expecting to get back; `None` stands for an `unreachable` that no call precedes.
    pub ends: BTreeSet<Option<usize>>,
    /// Whether it can return. What cannot is part of the machinery that ends a VM.
    pub returns: bool,
    type_index: u32,
    is_in_table: bool,
}

/// How a function is reached.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Way {
    /// Calls through the table.
    pub guesses: usize,
    /// All calls.
    pub steps: usize,
    before: Option<usize>,
}

/// All functions of a module, imports first, as wasm numbers them.
pub struct CallGraph {
    /// The functions.
    pub functions: Vec<Function>,
    /// Exported functions by name.
    pub exports: BTreeMap<String, usize>,
}

impl CallGraph {
    /// Reads a module that still has the names of its functions.
    pub fn of(module: &[u8]) -> Result<Self> {
        let (mut functions, mut exports, mut bodies) = (Vec::new(), BTreeMap::new(), Vec::new());
        let (mut in_table, mut names) = (BTreeSet::new(), BTreeMap::new());
        let declared = |type_index| Function { type_index, returns: true, ..Function::default() };
        for payload in Parser::new(0).parse_all(module) {
            match payload? {
                Payload::ImportSection(imports) => {
                    for import in imports.into_imports() {
                        if let TypeRef::Func(type_index) = import?.ty {
                            functions.push(declared(type_index));
                        }
                    }
                }
                Payload::FunctionSection(types) => {
                    for type_index in types {
                        functions.push(declared(type_index?));
                    }
                }
                Payload::ExportSection(section) => {
                    for export in section {
                        let export = export?;
                        if export.kind == ExternalKind::Func {
                            exports.insert(export.name.to_owned(), export.index as usize);
                        }
                    }
                }
                Payload::ElementSection(elements) => {
                    for element in elements {
                        // A table of another kind would hide calls.
                        let ElementItems::Functions(indices) = element?.items else {
                            anyhow::bail!("a table that is not a list of functions")
                        };
                        for index in indices {
                            in_table.insert(index? as usize);
                        }
                    }
                }
                Payload::CodeSectionEntry(body) => bodies.push(body),
                Payload::CustomSection(section) => {
                    if let KnownCustom::Name(subsections) = section.as_known() {
                        for subsection in subsections {
                            if let Name::Function(map) = subsection? {
                                names = function_names(map)?;
                            }
                        }
                    }
                }
                _ => {}
            }
        }
        let first = functions.len() - bodies.len();
        for (index, body) in bodies.iter().enumerate() {
            functions[first + index].read(body)?;
        }
        for (index, function) in functions.iter_mut().enumerate() {
            function.name = names.remove(&index).with_context(|| format!("function {index} has no name"))?;
            function.is_in_table = in_table.contains(&index);
        }
        let never_return: BTreeSet<_> = (0..functions.len()).filter(|index| !functions[*index].returns).collect();
        for function in &mut functions {
            // An `unreachable` after the call of somebody who could return is one by itself.
            let ends = std::mem::take(&mut function.ends).into_iter();
            function.ends = ends.map(|callee| callee.filter(|callee| never_return.contains(callee))).collect();
            function.ends.extend(function.calls.intersection(&never_return).copied().map(Some));
        }
        Ok(Self { functions, exports })
    }

    /// Whom a function may reach, and how: with as few calls through the table as can be, for those are guesses. Such a call
    /// may reach everyone in the table who has that type, but for those whom `is_called` denies. What never returns is not
    /// followed: the VM is lost there.
    pub fn reachable(&self, from: usize, is_called: impl Fn(&Function) -> bool) -> BTreeMap<usize, Way> {
        let mut in_table: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (index, function) in self.functions.iter().enumerate() {
            if function.is_in_table && is_called(function) {
                in_table.entry(function.type_index).or_default().push(index);
            }
        }
        let mut reached = BTreeMap::new();
        let mut next = BinaryHeap::from([Reverse((Way::default(), from))]);
        while let Some(Reverse((way, function))) = next.pop() {
            if !self.functions[function].returns || reached.contains_key(&function) {
                continue;
            }
            let calls = self.functions[function].calls.iter().map(|callee| (0, *callee));
            let indirect = self.functions[function].calls_indirectly.iter().flat_map(|of_type| in_table.get(of_type));
            for (guesses, callee) in calls.chain(indirect.flatten().map(|callee| (1, *callee))) {
                let way = Way { guesses: way.guesses + guesses, steps: way.steps + 1, before: Some(function) };
                next.push(Reverse((way, callee)));
            }
            reached.insert(function, way);
        }
        reached
    }

    /// The names on the way to a function.
    pub fn path(&self, reached: &BTreeMap<usize, Way>, to: usize) -> String {
        let mut path = self.functions[to].name.clone();
        let mut way = reached[&to];
        while let Some(before) = way.before {
            let arrow = if reached[&before].guesses == way.guesses { "->" } else { "-(table)->" };
            path = format!("{} {arrow} {path}", self.functions[before].name);
            way = reached[&before];
        }
        path
    }
}

fn function_names(map: NameMap<'_>) -> Result<BTreeMap<usize, String>> {
    let name = |naming: Naming<'_>| format!("{:#}", rustc_demangle::demangle(naming.name));
    map.into_iter()
        .map(|naming| naming.map(|naming| (naming.index as usize, name(naming))).map_err(Into::into))
        .collect()
}

/// A block that is open: whether its end can be reached.
#[derive(Default)]
struct Block {
    is_loop: bool,
    is_branched_to: bool,
    /// An `if` whose `else` has not been met: its end is reached if the condition does not hold.
    may_be_skipped: bool,
}

impl Function {
    fn read(&mut self, body: &FunctionBody<'_>) -> Result<()> {
        // The body itself is a block: to branch out of it is to return.
        let mut blocks = vec![Block::default()];
        let (mut is_reachable, mut before) = (true, None);
        let branch = |blocks: &mut Vec<Block>, depth: u32| {
            let index = blocks.len() - 1 - depth as usize;
            blocks[index].is_branched_to = true;
        };
        for operator in body.get_operators_reader()? {
            let called = before.take();
            match operator? {
                Operator::Call { function_index } => {
                    self.calls.insert(function_index as usize);
                    before = Some(function_index as usize);
                }
                Operator::CallIndirect { type_index, .. } => {
                    self.calls_indirectly.insert(type_index);
                }
                Operator::Unreachable => {
                    if is_reachable {
                        self.ends.insert(called);
                    }
                    is_reachable = false;
                }
                Operator::Block { .. } => blocks.push(Block::default()),
                Operator::Loop { .. } => blocks.push(Block { is_loop: true, ..Block::default() }),
                Operator::If { .. } => blocks.push(Block { may_be_skipped: is_reachable, ..Block::default() }),
                Operator::Else => {
                    let block = blocks.last_mut().context("else without if")?;
                    block.is_branched_to |= is_reachable;
                    is_reachable = std::mem::take(&mut block.may_be_skipped);
                }
                Operator::End => {
                    let block = blocks.pop().context("end without block")?;
                    is_reachable |= block.may_be_skipped || (block.is_branched_to && !block.is_loop);
                }
                Operator::Br { relative_depth } => {
                    if is_reachable {
                        branch(&mut blocks, relative_depth);
                    }
                    is_reachable = false;
                }
                Operator::BrIf { relative_depth } if is_reachable => branch(&mut blocks, relative_depth),
                Operator::BrTable { targets } => {
                    if is_reachable {
                        targets
                            .targets()
                            .collect::<Result<Vec<_>, _>>()?
                            .into_iter()
                            .for_each(|depth| branch(&mut blocks, depth));
                        branch(&mut blocks, targets.default());
                    }
                    is_reachable = false;
                }
                Operator::Return => {
                    if is_reachable {
                        blocks[0].is_branched_to = true;
                    }
                    is_reachable = false;
                }
                Operator::ReturnCall { .. } | Operator::ReturnCallIndirect { .. } | Operator::ReturnCallRef { .. } => {
                    anyhow::bail!("tail calls are not read here")
                }
                _ => {}
            }
        }
        self.returns = is_reachable;
        Ok(())
    }
}
