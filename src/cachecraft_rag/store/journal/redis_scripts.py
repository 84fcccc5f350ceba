"""The steps of a Redis journal as Lua scripts: each runs as one, whoever else writes and whoever dies.

The journal is ONE hash, so that a server that evicts or forgets keys loses all of it or nothing:

    epoch, run_id     the history, and the run of the server it belongs to
    seq, floor        of the last entry, and of the last that is folded into `past`
    past              the folded entries, as a JSON list of [seq, entry]
    members           JSON object: name -> [acknowledged seq, end of the lease in ms]
    grace_until       leases of members nobody knows may last until then, in ms
    e<seq>            an entry

Another run of the server (a restart, or another node after a failover) may have lost the last entries, or
all: it begins a new epoch. All times are the server's (`TIME`).

Every script gets KEYS[1] = the hash, ARGV[1] = a fresh epoch id and ARGV[2] = the longest lease in ms.
"""

from __future__ import annotations

_COMMON = """
local journal, fresh, max_lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000
local function get(field) return redis.call('HGET', journal, field) end
local function set(field, value) redis.call('HSET', journal, field, value) end
-- Rounded up and written in full: a lease must not end earlier than its holder believes.
local function set_time(field, value) set(field, string.format('%d', math.ceil(value))) end
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local epoch, begun = get('epoch'), 0
if not epoch or get('run_id') ~= run_id then
  begun = epoch and 2 or 1
  epoch = fresh
  set('epoch', epoch)
  set('run_id', run_id)
  set('members', '{}')
  set_time('grace_until', now + max_lease)
  redis.call('HSETNX', journal, 'seq', 0)
  redis.call('HSETNX', journal, 'floor', 0)
end
local seq, floor = tonumber(get('seq')), tonumber(get('floor'))
local members = cjson.decode(get('members'))
local function holds(member) return member[2] > now end
local function keep_member(name, taken, lease)
  members[name] = {taken, math.ceil(now + tonumber(lease))}
  set('members', cjson.encode(members))
end
local function is_stale(of, position)
  return of ~= epoch or (position > 0 and position < floor) or position > seq
end
local function settled(upto)
  for _, member in pairs(members) do
    if holds(member) then upto = math.min(upto, member[1]) end
  end
  return upto
end
"""

END = _COMMON + "return {epoch, seq, begun}"
"""() -> epoch, last seq, and whether this call began the epoch: 0 no, 1 on nothing, 2 over another run's."""

APPEND = (
    _COMMON
    + """
for i = 3, #ARGV do
  seq = seq + 1
  set('e' .. string.format('%d', seq), ARGV[i])
end
set('seq', string.format('%d', seq))
return {epoch, seq, begun}
"""
)
"""(entries...) -> as END."""

READ = (
    _COMMON
    + """
local after, limit = tonumber(ARGV[4]), tonumber(ARGV[5])
if is_stale(ARGV[3], after) then return false end
local past = after == 0 and get('past') or '[]'
local start = math.max(after, floor)
local found = {}
for number = start + 1, math.min(seq, start + limit) do
  found[#found + 1] = get('e' .. string.format('%d', number)) or ''
end
return {past, start, found}
"""
)
"""(epoch, after, limit) -> folded entries, where the others begin, and those; nil: start over."""

CONTINUES = (
    _COMMON
    + """
local position = tonumber(ARGV[4])
return ARGV[3] == epoch and floor <= position and position <= seq and 1 or 0
"""
)
"""(epoch, seq) -> 1, or 0 when entries behind it are gone."""

JOIN = (
    _COMMON
    + """
for name, member in pairs(members) do
  if not holds(member) then members[name] = nil end
end
keep_member(ARGV[3], 0, ARGV[4])
return {epoch, seq, begun}
"""
)
"""(name, lease in ms) -> as END."""

ACKNOWLEDGE = (
    _COMMON
    + """
local position = tonumber(ARGV[5])
if is_stale(ARGV[4], position) then return false end
keep_member(ARGV[3], position, ARGV[6])
return 1
"""
)
"""(name, epoch, seq, lease in ms) -> 1; nil: start over."""

LEAVE = (
    _COMMON
    + """
members[ARGV[3]] = nil
set('members', cjson.encode(members))
return 1
"""
)
"""(name)"""

WAITING = (
    _COMMON
    + """
if ARGV[3] ~= epoch then return false end
local late = {}
for name, member in pairs(members) do
  if holds(member) and member[1] < tonumber(ARGV[4]) then late[#late + 1] = name end
end
return {late, tonumber(get('grace_until')) > now and 1 or 0}
"""
)
"""(epoch, seq) -> names, and whether unknown members may have leases; nil: start over."""

SETTLED = _COMMON + "return {epoch, floor, settled(seq - tonumber(ARGV[3]))}"
"""(entries to keep) -> epoch, floor, and up to where entries may be folded."""

COMPACT = (
    _COMMON
    + """
local upto = tonumber(ARGV[5])
if ARGV[3] ~= epoch or tonumber(ARGV[4]) ~= floor or settled(upto) < upto then return 0 end
for number = floor + 1, upto do redis.call('HDEL', journal, 'e' .. string.format('%d', number)) end
set('past', ARGV[6])
set('floor', string.format('%d', upto))
return 1
"""
)
"""(epoch, floor, up to, folded entries) -> 1, or 0 when something changed meanwhile."""

AUDIT = (
    _COMMON
    + """
local faults = {}
local policy = string.match(redis.call('INFO', 'memory'), 'maxmemory_policy:([%w-]+)') or ''
if string.find(policy, '^allkeys') then
  faults[1] = 'maxmemory-policy is ' .. policy .. ': the server may evict the journal, '
    .. 'which drops all stored KV; set noeviction or one of volatile-*'
end
local missing = 0
for number = floor + 1, seq do
  if redis.call('HEXISTS', journal, 'e' .. string.format('%d', number)) == 0 then missing = missing + 1 end
end
if missing > 0 then faults[#faults + 1] = missing .. ' entries are missing' end
if floor > seq then faults[#faults + 1] = 'the compacted past ends behind the last entry' end
return faults
"""
)
"""() -> a sentence for each fault."""
