-- End a lease with what was used, exactly once: {id, holder, fence, lease epoch, expiry known to the caller, when the
-- work ended, uses {counter, units, window start}}. Answers what was used above the reservation, by use.
local id, holder, fence, lease_epoch, expires, ended, uses = unpack(request)
forget_old()

local function settle_one(parts, used)
  local newest, reserved = nil, 0
  for _, part in ipairs(parts) do
    newest, reserved = part, reserved + part[UNITS]
  end
  if newest[COUNTER] == HELD then return 0 end
  local over, unused = used - reserved, reserved - used
  if over > 0 then
    if newest[COUNTER] == RATE then rate_add(newest[KEY], second, over) else
      calendar_raise(newest[KEY], newest[PLACE], over)
    end
    return over
  end
  for i = #parts, 1, -1 do
    local part = parts[i]
    local lowered = math.min(unused, part[UNITS])
    if lowered > 0 then
      if part[COUNTER] == RATE then rate_lower(part[KEY], part[PLACE], lowered) else
        calendar_lower(part[KEY], part[PLACE], lowered)
      end
    end
    unused = unused - lowered
  end
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
    overruns[i] = parts and settle_one(parts, use[2]) or 0
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
      if ended > complete then calendar_raise(key, start, units) end
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
write_record(id, {SETTLED, 0, 0, overruns}, math.max(now, expires) + kept)
if lost then return answer('settled', epoch, 0, 0, overruns) end
return answer('ended', 'expired')
