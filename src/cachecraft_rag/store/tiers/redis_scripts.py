"""The steps of a Redis tier as Lua scripts: each runs as one, whoever else writes and whoever dies.

Every script gets KEYS = the books (`lru`: sorted set of names by last use; `sizes`: hash of the bytes each
name is charged with; `meta`: hash of `used`, their sum, and `clock`, which counts uses; `names`: sorted set
of names, all of score 0, so in the order of their bytes) and as its first argument what blob keys begin with.
A blob's key is not among KEYS, as the blobs to evict are not known before; it has the books' hash tag, so it
lies on the same node of a cluster.

They are sent as text (`EVAL`): Redis keeps them compiled by their hash, and a server that was restarted needs
nobody to load them again, within pipelines neither.
"""

from __future__ import annotations

_COMMON = """
local lru, sizes, meta, names, blobs = KEYS[1], KEYS[2], KEYS[3], KEYS[4], ARGV[1]
local function used() return tonumber(redis.call('HGET', meta, 'used') or '0') end
local function drop(name)
  redis.call('DEL', blobs .. name)
  redis.call('ZREM', lru, name)
  redis.call('ZREM', names, name)
  local size = redis.call('HGET', sizes, name)
  if not size then return 0 end
  redis.call('HDEL', sizes, name)
  redis.call('HINCRBY', meta, 'used', '-' .. size)
  return 1
end
local function evict(num_bytes)
  local count = 0
  while used() > num_bytes do
    local oldest = redis.call('ZRANGE', lru, 0, 0)[1]
    if not oldest then return -1 end
    drop(oldest)
    count = count + 1
  end
  return count
end
"""

ADMIT = (
    _COMMON
    + """
local name, size, budget = ARGV[2], ARGV[3], tonumber(ARGV[4])
local num = redis.call('HLEN', sizes)
-- The server may have evicted one of the books: then the sum starts from nothing, or below.
if redis.call('ZCARD', lru) ~= num or redis.call('ZCARD', names) ~= num then return -1 end
if used() < 0 or (num > 0 and used() == 0) then return -1 end
drop(name)
local count = evict(budget - tonumber(size))
if count < 0 then return -1 end
redis.call('HSET', sizes, name, size)
redis.call('HINCRBY', meta, 'used', size)
redis.call('ZADD', lru, redis.call('HINCRBY', meta, 'clock', 1), name)
redis.call('ZADD', names, 0, name)
return count
"""
)
"""(name, bytes charged, budget) -> how many were evicted; -1: the books do not add up.

The blob itself is set in the same transaction by a command of its own: a script would copy it twice.
"""

TOUCH = (
    _COMMON
    + """
local name = ARGV[2]
if redis.call('EXISTS', blobs .. name) == 0 then return drop(name) end
-- A server at its memory limit refuses the count, but must not refuse the blob.
local now = redis.pcall('HINCRBY', meta, 'clock', 1)
if type(now) == 'number' then redis.call('ZADD', lru, 'XX', now, name) end
return 0
"""
)
"""(name): count it as used; one that the server itself evicted leaves the books."""

DELETE = (
    _COMMON
    + """
local count = 0
for i = 2, #ARGV do count = count + drop(ARGV[i]) end
return count
"""
)
"""(names...) -> how many there were."""

DISCARD = (
    _COMMON
    + """
if redis.call('GET', blobs .. ARGV[2]) ~= ARGV[3] then return 0 end
return drop(ARGV[2])
"""
)
"""(name, value) -> 1 if the blob had this value and was dropped, else 0."""

LIST = (
    _COMMON
    + """
if redis.call('ZCARD', names) ~= redis.call('HLEN', sizes) then return false end
return redis.call('ZRANGEBYLEX', names, ARGV[2], ARGV[3], 'LIMIT', 0, ARGV[4])
"""
)
"""(start, end, number) -> that many names at most, in order; nil: the books do not add up."""

UNLISTED = (
    _COMMON
    + """
local found = {}
for i = 3, #ARGV do
  if redis.call('HEXISTS', sizes, ARGV[i]) == 0 and redis.call('EXISTS', blobs .. ARGV[i]) == 1 then
    found[#found + 1] = ARGV[i]
    if ARGV[2] == '1' then redis.call('DEL', blobs .. ARGV[i]) end
  end
end
return found
"""
)
"""(repair, names...) -> those that are stored but not in the books; with repair they are removed."""

AUDIT = (
    _COMMON
    + """
local repair, budget, entry_bytes, name_bytes = ARGV[2] == '1', tonumber(ARGV[3]), ARGV[4], ARGV[5]
local faults, sum = {}, 0
local function fault(text) faults[#faults + 1] = text end
for _, name in ipairs(redis.call('HKEYS', sizes)) do
  local noted = tonumber(redis.call('HGET', sizes, name))
  local size = redis.call('STRLEN', blobs .. name) + entry_bytes + name_bytes * #name
  if redis.call('EXISTS', blobs .. name) == 0 then
    fault(name .. ' is listed but not stored')
    if repair then redis.call('HDEL', sizes, name) noted = 0 end
  elseif noted ~= size then
    fault(name .. ' takes ' .. size .. ' bytes, the books say ' .. tostring(noted))
    if repair then redis.call('HSET', sizes, name, size) noted = size end
  end
  if not redis.call('ZSCORE', lru, name) and redis.call('HEXISTS', sizes, name) == 1 then
    fault(name .. ' is not in the order of use')
    if repair then redis.call('ZADD', lru, 0, name) end
  end
  if not redis.call('ZSCORE', names, name) and redis.call('HEXISTS', sizes, name) == 1 then
    fault(name .. ' is not among the names')
    if repair then redis.call('ZADD', names, 0, name) end
  end
  sum = sum + (noted or 0)
end
for set, title in pairs({[lru] = 'in the order of use', [names] = 'among the names'}) do
  for _, name in ipairs(redis.call('ZRANGE', set, 0, -1)) do
    if redis.call('HEXISTS', sizes, name) == 0 then
      fault(name .. ' is ' .. title .. ' but not listed')
      if repair then redis.call('ZREM', set, name) end
    end
  end
end
if used() ~= sum then
  fault('blobs take ' .. sum .. ' bytes, the books say ' .. used())
  if repair then redis.call('HSET', meta, 'used', string.format('%d', sum)) end
end
if sum > budget then
  fault('blobs take ' .. sum .. ' bytes, over the budget of ' .. budget)
  if repair then evict(budget) end
end
return faults
"""
)
"""(repair, budget, bytes per entry, bytes per character of a name) -> a sentence for each fault."""
