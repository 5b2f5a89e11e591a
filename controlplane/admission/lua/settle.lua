-- End a lease with what was used, exactly once: {id, holder, fence, lease epoch, expiry known to the caller, when the
-- work ended, uses {counter, units, window start}}. Answers what was used above the reservation, by use.
local id, holder, fence, lease_epoch, expires, ended, uses = unpack(request)
tidy()

local function settle_one(parts, used)
  local newest, reserved = nil, 0
  for _, part in ipairs(parts) do
    newest, reserved = part, reserved + part[UNITS]
    if part[COUNTER] == CALENDAR then calendar_let_go(part[KEY], part[PLACE], part[UNITS]) end
  end
  if newest[COUNTER] == HELD then return 0 end
  local over, unused = math.max(0, used - reserved), math.max(0, reserved - used)
  if over > 0 then
    if newest[COUNTER] == RATE then rate_add(newest[KEY], second, over) else
      calendar_raise(newest[KEY], newest[PLACE], over)
      calendar_told(newest[KEY], newest[PLACE], over, ended)
    end
  end
  for i = #parts, 1, -1 do
    local part = parts[i]
    local lowered = math.min(unused, part[UNITS])
    if lowered > 0 then
      if part[COUNTER] == RATE then rate_lower(part[KEY], part[PLACE], lowered) else
        calendar_lower(part[KEY], part[PLACE], lowered)
      end
    end
    if part[COUNTER] == CALENDAR then calendar_told(part[KEY], part[PLACE], part[UNITS] - lowered, ended) end
    unused = unused - lowered
  end
  return over
end

-- The sum that takes a lease's units out of the counter has what it used if that ended before.
local function settle_written_off(part, used)
  local key, start = part[KEY], int(part[PLACE])
  local marks = redis.call('HMGET', key, 'a' .. start, 'd' .. start, 'w' .. start)
  if not marks[3] and ended > tonumber(marks[2] or marks[1] or math.huge) then calendar_raise(key, part[PLACE], used) end
  return 0
end

local function settle_record(record)
  local by_key, overruns = {}, {}
  for _, part in ipairs(record[PARTS]) do
    by_key[part[KEY]] = by_key[part[KEY]] or {}
    table.insert(by_key[part[KEY]], part)
    if part[COUNTER] == HELD then held_end(part[KEY], id, record[TAKEN]) end
  end
  for i, use in ipairs(uses) do
    local parts = by_key[KEYS[FIRST + i]]
    local settle_parts = parts and parts[1][GONE] and settle_written_off or settle_one
    overruns[i] = parts and settle_parts(parts[1][GONE] and parts[#parts] or parts, use[2]) or 0
  end
  return overruns
end

-- The store lost the lease or never heard of it. Usage that ended before a calendar counter was hydrated is part of its
-- base, and a counter that is still cold will be hydrated from a ledger that has it.
local function settle_lost()
  local overruns, kept = {}, SETTLED_KEPT
  for i, use in ipairs(uses) do
    local key, counter, units, start = KEYS[FIRST + i], use[1], use[2], use[3]
    overruns[i] = 0
    if units > 0 then kept = DAY end
    if counter == RATE then
      rate_add(key, math.floor(ended / SECOND), units)
    elseif counter == CALENDAR then
      local complete = tonumber(redis.call('HGET', key, 'a' .. int(start)) or math.huge)
      if ended > complete then
        calendar_raise(key, start, units)
        calendar_told(key, start, units, ended)
      end
    end
  end
  return overruns, kept
end

local record = read_record(id)
if record and record[STATE] == SETTLED then return answer('settled', epoch, 1, record[3], record[4]) end
if record then
  if is_fenced(record, holder, fence) then return answer('ended', 'fenced') end
  local late = record[EXPIRES] <= now and 1 or 0
  local overruns = settle_record(record)
  write_record(id, {SETTLED, 0, late, overruns}, math.max(now, record[EXPIRES]) + SETTLED_KEPT)
  return answer('settled', epoch, 0, late, overruns)
end
-- Without a record a mark stays, so that an acquire which arrives after its own release takes nothing.
local lost = is_lost(lease_epoch, expires)
local overruns, kept = {}, SETTLED_KEPT
if lost then overruns, kept = settle_lost() end
write_record(id, {SETTLED, 0, 0, overruns}, math.max(now + kept, expires + SETTLED_KEPT))
if lost then return answer('settled', epoch, 0, 0, overruns) end
return answer('ended', 'expired')
