-- Counters and lease records of one tenant. Every script begins with clock.lua and this file.
--
-- KEYS[1..3]  the tenant's meta hash, lease records and the order in which records are forgotten
-- KEYS[4..]   the counters of the request
-- ARGV[1]     the request, msgpack; every amount a whole number below 2^53, every time in microseconds
--
-- A rate counter is a hash: units by second, their total t, the oldest and latest second o and l.
-- A calendar counter is a hash: units by window start; p<start> what live leases hold of a window not hydrated yet;
-- a<start> until when the base it was hydrated from is complete; r<start> what is held by leases not written off; while
-- it is in doubt d<start>, since when, and o<start>, what r less the counter was then; w<start> that more has been
-- written off since.
-- A held counter is a sorted set: live leases by expiry. What has expired does not count, removed or not.
local META, LEASES, ORDER, FIRST = KEYS[1], KEYS[2], KEYS[3], 3
local RATE, CALENDAR, HELD = 1, 2, 3
local LIVE, SETTLED = 0, 1
local STATE, EXPIRES, FENCE, TAKEN, STEP, HOLDER, PARTS = 1, 2, 3, 4, 5, 6, 7
local KEY, COUNTER, UNITS, PLACE, GONE = 1, 2, 3, 4, 5
local SECOND = 1000000
local SPAN = 61              -- seconds a bucket counts: every unit in it is then older than a minute
local REAPED = 16            -- records and slots one call removes at most
local RECORDS = 100000       -- records kept for a tenant
local DAY = 86400 * SECOND
local WRITTEN_OFF = 3600 * SECOND -- after its expiry; nobody keeps a lease alive for longer than that
local SWEPT = 128            -- leases one call looks at; more than one call gives the same expiry
local SETTLED_KEPT = 60 * SECOND
local QUIET_MS = 33 * 86400000 -- longer than any window: to its end it is known what dead leases hold of it

local request = cmsgpack.unpack(ARGV[1])
local now = server_time()
local second = math.floor(now / SECOND)

local function int(number)
  return string.format('%.0f', number)
end

local function answer(...)
  return cmsgpack.pack({...})
end

-- Tenant --------------------------------------------------------------------------------------------------------------

local function store_epoch()
  local meta = redis.call('HMGET', META, 'epoch', 'fence', 'touched', 'swept')
  if not meta[1] then
    redis.call('HSET', META, 'epoch', int(now))
    meta[1] = int(now)
  end
  return tonumber(meta[1]), tonumber(meta[2] or 0), tonumber(meta[3] or 0), tonumber(meta[4] or 0)
end

local epoch, last_fence, touched, swept = store_epoch()

local function new_fence()
  last_fence = math.max(last_fence + 1, now)
  redis.call('HSET', META, 'fence', int(last_fence))
  return last_fence
end

-- Only what `write_off_expired` has passed.
local function forget_old()
  local old = redis.call('ZRANGEBYSCORE', ORDER, '-inf', int(math.min(now, swept)), 'LIMIT', 0, REAPED)
  if #old == 0 and redis.call('ZCARD', ORDER) > RECORDS then
    old = redis.call('ZRANGE', ORDER, 0, REAPED - 1)
  end
  if #old > 0 then
    redis.call('ZREM', ORDER, unpack(old))
    redis.call('HDEL', LEASES, unpack(old))
  end
end

-- Once an hour: a tenant nobody asks for is forgotten as a whole.
local function touch()
  if second - touched >= 3600 or second < touched then
    redis.call('HSET', META, 'touched', int(second))
    for i = 1, FIRST do redis.call('PEXPIRE', KEYS[i], QUIET_MS) end
  end
end

local function read_record(id)
  local packed = redis.call('HGET', LEASES, id)
  return packed and cmsgpack.unpack(packed)
end

local function write_record(id, record, until_time)
  redis.call('HSET', LEASES, id, cmsgpack.pack(record))
  redis.call('ZADD', ORDER, int(until_time), id)
  touch()
end

local function write_live(id, record)
  write_record(id, record, record[EXPIRES] + DAY)
end

-- Somebody else holds the lease now.
local function is_fenced(record, holder, fence)
  return record[HOLDER] ~= holder and record[FENCE] ~= fence
end

-- A record is kept until after its lease has expired. So one that is missing was lost if its lease has not expired by
-- now, if it was taken from another store, or if the store was never told of it.
local function is_lost(lease_epoch, expires)
  return lease_epoch ~= epoch or now < expires
end

-- Rate ----------------------------------------------------------------------------------------------------------------

local function rate_write(key, total, oldest, latest)
  redis.call('HSET', key, 't', int(total), 'o', int(oldest), 'l', int(latest))
end

local function rate_seconds(oldest, latest)
  local fields = {}
  for bucket = oldest, latest do fields[#fields + 1] = int(bucket) end
  return fields
end

-- Units of the last minute; the oldest and the latest second that hold any.
local function rate_read(key)
  local head = redis.call('HMGET', key, 't', 'o', 'l')
  if not head[1] then return 0, second, second end
  local total, oldest, latest = tonumber(head[1]), tonumber(head[2]), tonumber(head[3])
  if second < latest then
    -- The clock went back: all of it stays charged for a whole window from now.
    redis.call('DEL', key)
    redis.call('HSET', key, int(second), int(total))
    redis.call('PEXPIRE', key, (SPAN + 1) * 1000)
    rate_write(key, total, second, second)
    return total, second, second
  end
  if latest <= second - SPAN then
    redis.call('DEL', key)
    return 0, second, second
  end
  if oldest <= second - SPAN then
    local gone = rate_seconds(oldest, second - SPAN)
    for _, units in ipairs(redis.call('HMGET', key, unpack(gone))) do total = total - tonumber(units or 0) end
    redis.call('HDEL', key, unpack(gone))
    oldest = second - SPAN + 1
    rate_write(key, total, oldest, latest)
  end
  return total, oldest, latest
end

local function rate_add(key, bucket, units)
  if units == 0 or bucket <= second - SPAN then return end
  local total, oldest, latest = rate_read(key)
  bucket = math.min(bucket, second)
  redis.call('HINCRBY', key, int(bucket), int(units))
  rate_write(key, total + units, math.min(oldest, bucket), math.max(latest, bucket))
  if total == 0 or bucket > latest then redis.call('PEXPIRE', key, (SPAN + 1) * 1000) end
end

local function rate_lower(key, bucket, units)
  local total, oldest, latest = rate_read(key)
  local lowered = math.min(units, tonumber(redis.call('HGET', key, int(bucket)) or 0))
  if lowered > 0 then
    redis.call('HINCRBY', key, int(bucket), int(-lowered))
    rate_write(key, total - lowered, oldest, latest)
  end
end

-- Microseconds until `need` of what is counted has left the window.
local function rate_wait(key, oldest, latest, need)
  local freed = 0
  for i, units in ipairs(redis.call('HMGET', key, unpack(rate_seconds(oldest, latest)))) do
    freed = freed + tonumber(units or 0)
    if freed >= need then return (oldest + i - 1 + SPAN) * SECOND - now end
  end
  return SPAN * SECOND
end

-- Calendar ------------------------------------------------------------------------------------------------------------

-- Start and end of the window that holds the server's time, or nil outside the two that the caller knows.
local function calendar_window(first, middle, last)
  if second < first or second >= last then return nil end
  if second < middle then return first, middle end
  return middle, last
end

local function calendar_keep(key, stop)
  redis.call('PEXPIREAT', key, int(stop * 1000 + 2 * 86400000))
end

local function calendar_field(key, start)
  if redis.call('HEXISTS', key, int(start)) == 1 then return int(start) end
  return 'p' .. int(start)
end

local function calendar_raise(key, start, units)
  if units > 0 then
    local created = redis.call('EXISTS', key) == 0
    redis.call('HINCRBY', key, calendar_field(key, start), int(units))
    if created then redis.call('PEXPIRE', key, 40 * 86400000) end
  end
end

local function calendar_lower(key, start, units)
  local field = calendar_field(key, start)
  local lowered = math.min(units, tonumber(redis.call('HGET', key, field) or 0))
  if lowered > 0 then redis.call('HINCRBY', key, field, int(-lowered)) end
end

-- A lease takes hold of units, or lets go of them.
local function calendar_hold(key, start, units)
  calendar_raise(key, start, units)
  if units > 0 then redis.call('HINCRBY', key, 'r' .. int(start), int(units)) end
end

local function calendar_let_go(key, start, units)
  local field = 'r' .. int(start)
  local lowered = math.min(units, tonumber(redis.call('HGET', key, field) or 0))
  if lowered > 0 then redis.call('HINCRBY', key, field, int(-lowered)) end
end

-- From now on it is known what of the counter the ledger cannot have: the leases' units, and what changes.
local function calendar_doubt(key, start)
  local known = redis.call('HMGET', key, int(start), 'r' .. int(start), 'd' .. int(start))
  if not known[1] then return end
  if known[3] then
    redis.call('HSET', key, 'w' .. int(start), 1)
  else
    redis.call('HSET', key, 'd' .. int(start), int(now), 'o' .. int(start),
      int(tonumber(known[2] or 0) - tonumber(known[1])))
  end
end

-- Use that ended before a counter was in doubt, and is counted in it after: the ledger's sum has it as well.
local function calendar_told(key, start, units, ended)
  local since = units > 0 and redis.call('HGET', key, 'd' .. int(start))
  if since and ended < tonumber(since) - SECOND then redis.call('HINCRBY', key, 'o' .. int(start), int(-units)) end
end

-- Held ----------------------------------------------------------------------------------------------------------------

local function held_count(key)
  local ended = redis.call('ZRANGEBYSCORE', key, '-inf', int(now), 'LIMIT', 0, REAPED)
  if #ended > 0 then redis.call('ZREM', key, unpack(ended)) end
  return redis.call('ZCOUNT', key, '(' .. int(now), '+inf')
end

local function held_add(key, id, expires)
  redis.call('ZADD', key, int(expires), id)
  local left = math.ceil((expires - now) / 1000) + 60000
  if redis.call('PTTL', key) < left then redis.call('PEXPIRE', key, left) end
end

-- An estimate: when `need` of `used` slots will be free in nine cases of ten, from the smoothed hold time; else the
-- next expiry.
local function held_wait(key, used, need)
  local smoothed = redis.call('HGET', META, 'h:' .. key)
  if smoothed then return math.ceil(tonumber(smoothed) * (need + 1.3) / used) end
  local next_one = redis.call('ZRANGEBYSCORE', key, '(' .. int(now), '+inf', 'WITHSCORES', 'LIMIT', need - 1, 1)
  return next_one[2] and tonumber(next_one[2]) - now or SECOND
end

local function held_end(key, id, taken)
  redis.call('ZREM', key, id)
  local smoothed = tonumber(redis.call('HGET', META, 'h:' .. key) or (now - taken))
  redis.call('HSET', META, 'h:' .. key, int(smoothed + (now - taken - smoothed) / 8))
end

-- Writing off ---------------------------------------------------------------------------------------------------------

local function write_off(id, record, doubted)
  local changed = false
  for _, part in ipairs(record[PARTS]) do
    if part[COUNTER] == CALENDAR and not part[GONE] then
      part[GONE], changed = 1, true
      calendar_let_go(part[KEY], part[PLACE], part[UNITS])
      if redis.call('HEXISTS', part[KEY], int(part[PLACE])) == 1 then
        doubted[part[KEY] .. ' ' .. int(part[PLACE])] = part
      else
        calendar_lower(part[KEY], part[PLACE], part[UNITS])
      end
    end
  end
  if changed then redis.call('HSET', LEASES, id, cmsgpack.pack(record)) end
end

-- What leases that expired long ago hold of calendar counters is only known to the ledger: the counters are in doubt
-- until it has been summed. They keep their units until then.
local function write_off_expired()
  local line = now + DAY - WRITTEN_OFF
  if line - swept < SECOND then return end
  local found = redis.call('ZRANGEBYSCORE', ORDER, '(' .. int(swept), int(line), 'WITHSCORES', 'LIMIT', 0, SWEPT)
  if #found == 2 * SWEPT then
    line = tonumber(found[#found])
    for i = #found, 2, -2 do
      if tonumber(found[i]) < line then
        line = tonumber(found[i])
        break
      end
    end
  end
  local doubted = {}
  for i = 1, #found, 2 do
    if tonumber(found[i + 1]) <= line then
      local record = read_record(found[i])
      if record and record[STATE] == LIVE then write_off(found[i], record, doubted) end
    end
  end
  for _, part in pairs(doubted) do calendar_doubt(part[KEY], part[PLACE]) end
  swept = line
  redis.call('HSET', META, 'swept', int(swept))
end

local function tidy()
  write_off_expired()
  forget_old()
end

-- Taking --------------------------------------------------------------------------------------------------------------

local NEVER = -1

local function judge_rate(key, amount, hard)
  local used, oldest, latest = rate_read(key)
  local wait = 0
  if hard >= 0 and used + amount > hard and amount <= hard then
    wait = rate_wait(key, oldest, latest, used + amount - hard)
  end
  return used, used > 0 and (latest + SPAN) * SECOND - now or 0, second, wait
end

local function judge_held(key, amount, hard)
  local used = held_count(key)
  local wait = 0
  if hard >= 0 and used + amount > hard and amount <= hard then
    wait = held_wait(key, used, used + amount - hard)
  end
  return used, 0, 0, wait
end

-- Where each counter stands, without taking anything. Answers the standing {used, reset, in doubt since} of each charge, the places
-- where units would go, what refuses {index, wait}, what is cold {index, start, stop}, and whether every charge knows
-- the window of the server's time. A charge of nothing stands in nobody's way.
local function judge(charges)
  local standings, places, refusals, cold, inside = {}, {}, {}, {}, true
  for i, charge in ipairs(charges) do
    local key, counter, amount, hard = KEYS[FIRST + i], charge[1], charge[2], charge[3]
    local used, reset, place, wait, doubt = 0, 0, 0, 0, 0
    if counter == RATE then
      used, reset, place, wait = judge_rate(key, amount, hard)
    elseif counter == HELD then
      used, reset, place, wait = judge_held(key, amount, hard)
    else
      local start, stop = calendar_window(charge[4], charge[5], charge[6])
      local known = start and redis.call('HMGET', key, int(start), 'd' .. int(start)) or {}
      local base = known[1]
      doubt = tonumber(known[2] or 0)
      used, place = tonumber(base or 0), start or 0
      reset = start and stop * SECOND - now or 0
      wait = reset
      if amount > 0 and not start then inside = false end
      if amount > 0 and start and not base then cold[#cold + 1] = {i - 1, start, stop} end
    end
    standings[i], places[i] = {used, reset, doubt}, place
    if hard >= 0 and amount > 0 and used + amount > hard then
      refusals[#refusals + 1] = {i - 1, amount > hard and NEVER or wait}
    end
  end
  return standings, places, refusals, cold, inside
end

-- What keeps the charges from being taken as a packed answer, or nil.
local function obstacle(standings, refusals, cold, inside)
  if not inside then return answer('outside', now) end
  if #cold > 0 then return answer('cold', epoch, now, cold) end
  if #refusals > 0 then return answer('refused', epoch, now, refusals, standings) end
end

-- Units of one place of a counter. Rate units that have left the window are kept as one sum.
local function put(parts, key, counter, units, place)
  local gone
  for i = #parts, 1, -1 do
    local part = parts[i]
    if part[KEY] == key and part[PLACE] == place then
      part[UNITS] = part[UNITS] + units
      return
    end
    if part[KEY] == key and counter == RATE and part[PLACE] <= second - SPAN then
      if gone then part[UNITS] = part[UNITS] + table.remove(parts, gone)[UNITS] end
      gone = i
    end
  end
  parts[#parts + 1] = {key, counter, units, place}
end

-- Take what `judge` allowed and write it into `record`.
local function take(charges, standings, places, id, record)
  for i, charge in ipairs(charges) do
    local key, counter, amount = KEYS[FIRST + i], charge[1], charge[2]
    if counter == RATE then
      rate_add(key, places[i], amount)
      if amount > 0 then standings[i][2] = (second + SPAN) * SECOND - now end
    elseif counter == CALENDAR then
      calendar_hold(key, places[i], amount)
    elseif amount > 0 then
      held_add(key, id, record[EXPIRES])
    end
    standings[i][1] = standings[i][1] + amount
    if amount > 0 then put(record[PARTS], key, counter, amount, places[i]) end
  end
end
